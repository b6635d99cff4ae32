"""Programs: the subcommands of `skipreduce`, and what they share."""
