"""Collectives: the public functions on arrays under a named axis, and the reduction over two networks."""
