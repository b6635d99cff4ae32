"""Workers: the group along a named axis, what travels between them, and how arrays are cut into their slices."""
