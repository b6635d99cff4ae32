"""Gradients: which leaves are compressed, in which buckets, at which ratio and shift; local gradients."""
