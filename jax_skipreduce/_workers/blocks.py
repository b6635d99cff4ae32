"""Arrays as blocks of slices: flattened, padded and cut in N rows, one per slice."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

# Blocks from this size on are read where they lie, slice by slice, and put together row by row. Nothing is faster at
# run time, but each row that is named takes time to compile and to start. So smaller blocks are joined, and gathered.
_MIN_BYTES_LARGE = 2**20


def is_large(x: jax.Array) -> bool:
    """Whether `x` is worth being moved by itself."""
    return x.size * x.dtype.itemsize >= _MIN_BYTES_LARGE


def slice_size(num_elements: int, num_workers: int) -> int:
    """Elements of one slice of a vector of `num_elements`, the last one padded: ceil(n / N)."""
    return -(-num_elements // num_workers)


def to_block(x: jax.Array, num_workers: int) -> jax.Array:
    """`x`, flattened, padded with zeros and cut into N slices: shape (N, ceil(x.size / N))."""
    padding = slice_size(x.size, num_workers) * num_workers - x.size
    flat = x.reshape(-1)
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(num_workers, -1 if x.size else 0)


def from_block(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_block` for an array of `shape`."""
    return block.reshape(-1)[: prod(shape)].reshape(shape)
