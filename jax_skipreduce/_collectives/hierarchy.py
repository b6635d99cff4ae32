"""Two networks: reduced in full over the fast one, with skipping over the slow one.

Of M workers on the fast axes each gets one part of every array, summed over the fast axes (reduce-scatter). The M parts
go around M rings over the slow axis at the same time, each of 1/M of the data. Then the parts are gathered over the
fast axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends.choice import reduce_arrays
from jax_skipreduce._backends.ppermute import Ring, accumulator, from_block, reduce_slices, to_block


def reduce_hierarchically(
    arrays: Sequence[jax.Array], ring: Ring, fast: tuple[Hashable, ...], **options: Any
) -> list[jax.Array]:
    """The mean of arrays of one dtype over the workers of `ring`, with skipping, and over the axes `fast`, in full.

    Args:
      arrays: floats, none of them empty; see `reduce_arrays`.
      ring: over the slow axes.
      fast: names, in the order of the mesh. None of them: `reduce_arrays`.
      **options: of `reduce_arrays`; `normalize` is not None.
    """
    if not fast:
        return reduce_arrays(arrays, ring, **options)
    num_parts, dtype = lax.axis_size(fast), arrays[0].dtype
    blocks = [to_block(array, num_parts) for array in arrays]
    # As in the ring: added up in float32, whatever the backend would do.
    joined = jnp.concatenate(blocks, axis=1).astype(accumulator(dtype))

    def by_ring(joined: jax.Array) -> jax.Array:
        everybody = dataclasses.replace(ring.over(fast), rank=lax.axis_index(fast))
        return reduce_slices([joined], everybody, 0, -1, None, "skip", None)

    # On CPUs around a ring of our own: between processes psum_scatter goes over Gloo, where it was reported wrong.
    part = lax.platform_dependent(joined, cpu=by_ring, default=lambda joined: lax.psum_scatter(joined, fast))
    # Divided at once: float16 has no room for sums of many.
    part = (part / num_parts).astype(dtype)
    ends = [sum(block.shape[1] for block in blocks[: i + 1]) for i in range(len(blocks))]
    means = reduce_arrays(jnp.split(part, ends[:-1]), ring, **options)
    own = jnp.concatenate(means)
    rows = ring.over(fast).gather(own)
    columns = jnp.split(rows, ends[:-1], axis=1)
    return [from_block(column, array.shape) for column, array in zip(columns, arrays, strict=True)]
