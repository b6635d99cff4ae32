"""Two networks: a reduction in full over the fast network, and in any way over the slow network.

Each of M workers on the fast axes gets one part of every array, summed over the fast axes (reduce-scatter). The M
parts, each with 1/M of the data, are reduced over the slow axis at the same time. Then the parts are gathered over the
fast axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends.ppermute import reduce_slices
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._workers.blocks import from_block, to_block
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import accumulator


def reduce_hierarchically(
    arrays: Sequence[jax.Array],
    fast_axes: tuple[Hashable, ...],
    reduce_slow: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
) -> list[jax.Array]:
    """The mean of arrays of one dtype over the axes `fast_axes`, in full, then over the slow ones by `reduce_slow`.

    Args:
      arrays: floats, none of them empty.
      fast_axes: names, in the order of the mesh. Without names, `reduce_slow` alone reduces.
      reduce_slow: arrays -> their means over the slow axes, in the same shapes.
    """
    if not fast_axes:
        return list(reduce_slow(arrays))
    num_parts, dtype = lax.axis_size(fast_axes), arrays[0].dtype
    blocks = [to_block(array, num_parts) for array in arrays]
    # 16-bit floats are added up in float32, as in the ring, whatever the backend would do.
    joined = jnp.concatenate(blocks, axis=1).astype(accumulator(dtype))

    def by_ring(joined: jax.Array) -> jax.Array:
        return reduce_slices([joined], Group.of(fast_axes), Reduction(shift=-1, normalize=None))

    # On CPUs a ring of our own: between processes psum_scatter goes over Gloo, where it was reported to be wrong.
    part = lax.platform_dependent(joined, cpu=by_ring, default=lambda joined: lax.psum_scatter(joined, fast_axes))
    # The division comes at once, because float16 has no room for sums of many.
    part = (part / num_parts).astype(dtype)
    ends = list(itertools.accumulate(block.shape[1] for block in blocks))
    own = jnp.concatenate(reduce_slow(jnp.split(part, ends[:-1])))
    rows = Channel(Group.of(fast_axes)).gather(own)
    columns = jnp.split(rows, ends[:-1], axis=1)
    return [from_block(column, array.shape) for column, array in zip(columns, arrays, strict=True)]
