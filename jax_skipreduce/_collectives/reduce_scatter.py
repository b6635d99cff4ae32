"""reduce_scatter(): the first half of an all-reduce, with skipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_skipreduce._backends.ppermute import reduce_slices
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._workers.arguments import check_dtype
from jax_skipreduce._workers.axes import AxisName
from jax_skipreduce._workers.blocks import to_block
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import Normalize, normalized
from jax_skipreduce._workers.wire import Wire


def reduce_scatter(
    x: jax.typing.ArrayLike,
    axis_name: AxisName,
    *,
    num_skipped: int | jax.Array = 0,
    shift: int | jax.Array = 0,
    normalize: Normalize | None = "skip",
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The first half of `all_reduce`: each worker gets one slice of the reduced `x`.

    Worker r gets slice (r + 1 + shift) mod N, so ``shift=-1`` gives worker r slice r, as
    `lax.psum_scatter` does. `all_gather` with the same `shift` puts the slices together again.

    Bytes on the wire per worker: (N-1-k) * ceil(x.size / N) * itemsize, in N-1-k steps.

    Args:
      x: array of any shape; see `all_reduce`.
      axis_name: a mesh axis or a tuple of them.
      num_skipped: k, steps left out, 0..N-1; an int or a traced integer scalar.
      shift: c, added to every slice index, modulo N; an int or a traced integer scalar.
      normalize: ``"skip"``, ``"drop"`` or None.
      wire_dtype: the dtype in which wider floats are sent. The result is not rounded to it.

    Returns:
      A 1-D array of ceil(x.size / N) elements of `x` flattened and padded with zeros, typed as varying.

    Raises:
      TypeError, ValueError: as in `all_reduce`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> x = jnp.arange(6.0).reshape(2, 3)  # two workers with three elements each
      >>> jax.vmap(lambda x: sr.reduce_scatter(x, "data", shift=-1, normalize=None), axis_name="data")(x)
      Array([[3., 5.],
             [7., 0.]], dtype=float32)
    """
    group = Group.of(axis_name)
    x = jnp.asarray(x)
    check_dtype(x.dtype, "x")
    reduction = Reduction(num_skipped=num_skipped, shift=shift, normalize=normalize, wire=Wire.of(wire_dtype)).checked(
        group
    )
    own = reduce_slices([to_block(x, group.size)], group, reduction)
    if not jnp.issubdtype(own.dtype, jnp.inexact):
        own = normalized(own, normalize, group.size, group.size - reduction.num_skipped)
    return own
