"""all_gather(): the second half of an all-reduce."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from jax_skipreduce._backends.ppermute import rows_by_slice
from jax_skipreduce._workers.arguments import checked_shift
from jax_skipreduce._workers.axes import AxisName
from jax_skipreduce._workers.blocks import from_block, slice_size
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.wire import Wire


def all_gather(
    x: jax.typing.ArrayLike,
    axis_name: AxisName,
    *,
    shift: int | jax.Array = 0,
    shape: tuple[int, ...] | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The second half of `all_reduce`: joins the slices that `reduce_scatter` gave to the workers.

    Bytes on the wire per worker: (N-1) * x.size * itemsize; one `lax.all_gather`.

    Args:
      x: this worker's slice, of any dtype and shape that are the same on all workers.
      axis_name: a mesh axis or a tuple of them.
      shift: the `shift` of `reduce_scatter`: worker r holds slice (r + 1 + shift) mod N.
      shape: shape of the whole array. Padding is cut off. None: the result is 1-D, with the padding.
      wire_dtype: the dtype in which wider floats are sent. A worker's own slice is rounded as well, so that all
        workers hold the same.

    Returns:
      An array of `shape`, typed as the same on all workers.

    Raises:
      ValueError: an array of `shape` is not cut in N slices of this size, or an axis is not bound.
      TypeError: `shift` is no integer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> halves = jnp.array([[3.0, 5.0], [7.0, 0.0]])
      >>> gather = lambda x: sr.all_gather(x, "data", shift=-1, shape=(3,))
      >>> jax.vmap(gather, axis_name="data")(halves)[0]
      Array([3., 5., 7.], dtype=float32)
    """
    group, wire = Group.of(axis_name), Wire.of(wire_dtype)
    x = jnp.asarray(x)
    shift = checked_shift("shift", shift, group)
    if shape is not None and slice_size(prod(shape), group.size) != x.size:
        raise ValueError(
            f"shape={tuple(shape)}: {prod(shape)} elements over {group.size} workers make slices of "
            f"{slice_size(prod(shape), group.size)} elements, but x has {x.size}"
        )
    rows = Channel(group, wire).gather(group.local(x).reshape(-1))
    rows = rows_by_slice(group, shift)(rows)
    return from_block(rows, (rows.size,) if shape is None else tuple(shape))
