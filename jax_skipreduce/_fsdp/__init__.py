"""FSDP: weights that are sharded over the data axis."""
