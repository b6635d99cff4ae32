"""all_reduce(): the sum or mean of an array over the workers of an axis, with skipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends.choice import reduce_arrays
from jax_skipreduce._backends.reduction import Backend, Mode, Reduction
from jax_skipreduce._workers.arguments import check_dtype
from jax_skipreduce._workers.axes import AxisName
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import Normalize, normalized
from jax_skipreduce._workers.wire import Wire


def all_reduce(
    x: jax.typing.ArrayLike,
    axis_name: AxisName,
    *,
    num_skipped: int | jax.Array = 0,
    shift: int | jax.Array = 0,
    normalize: Normalize | None = "skip",
    mode: Mode = "skip",
    key: jax.Array | None = None,
    num_gather_skipped: int | jax.Array = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Sum or mean of `x` over the workers of an axis, with reduce-scatter steps left out.

    `x` is flattened, padded and cut in N slices. Slice j is reduced over N-k workers; the workers
    j-c, j-c+1, .., j-c+k-1 (mod N) are skipped, where k is `num_skipped` and c is `shift`. With
    ``num_skipped=0`` it is ``lax.pmean(x, axis_name)`` (``lax.psum`` with ``normalize=None``), in
    another order of additions.

    Bytes on the wire per worker: (2(N-1) - k) * ceil(x.size / N) * itemsize, so the collective
    gets 2(N-1) / (2(N-1) - k) times shorter. With ``backend="xla"`` the reduce-scatter is N-1-k
    `lax.ppermute` steps, the all-gather one `lax.all_gather` (N-1 steps of the ring).

    float16 and bfloat16 are added up in float32 and sent in their own dtype, rounded once per step.
    With `wire_dtype`, wider floats are sent rounded as well, and `itemsize` is that of `wire_dtype`.
    All workers get the same bits, and every run gives these bits again.

    Args:
      x: this worker's array, float16, bfloat16, float32, float64, complex or integer; of any shape, which
        is the same on all workers. A replicated x is added N times, as in `lax.psum`.
      axis_name: a mesh axis or a tuple of them (in any order); under `vmap` and `pmap` one axis.
      num_skipped: k, reduce-scatter steps left out, 0..N-1. An int, or a traced integer scalar that
        is the same on all workers. With a traced k, one program serves all k, values out of range are
        clamped, and reverse-mode differentiation is not possible.
      shift: c, added to every slice index, modulo N. An int or a traced integer scalar that is the
        same on all workers.
      normalize: ``"skip"`` divides by N: what was skipped counts as zero. ``"drop"`` divides by the
        number of contributors, N-k. None gives the plain sum.
      mode: ``"skip"`` leaves out steps. ``"dropout"`` (Algorithm 1) is the fine-grained yardstick:
        every step is made, and each worker after the first adds each of its elements with
        probability 1 - k/N. Dropout saves no bytes.
      key: PRNG key for ``mode="dropout"``, the same on all workers, and a new key for each call.
      num_gather_skipped: all-gather steps left out, 0..N-1 (section 5.2; for comparison). **Replicas
        diverge**: worker r gets zeros for the reduced slices of the workers r+1, .., r+g, so each
        worker gets other values, and under ``check_vma=True`` the result is typed as varying. That saves
        g more steps.
      wire_dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: wider floats are rounded to this dtype for
        the wire, and added up in their own dtype. Other arrays, and all arrays with None, are sent as they are.
        float16 overflows above 65504, which a sum of many may reach.
      backend: ``"xla"`` sends slices with `lax.ppermute`. ``"native"`` is one custom call into the native
        kernels: between the CPU devices of one process (floats of 16 to 64 bits), or, with jaxlib 0.11.2, between
        NVIDIA GPUs (16 and 32 bits; not yet run on a GPU). ``"auto"`` uses the native kernels on CPU devices of one
        process if they were built (`native_info` says), else ``"xla"``. The environment variable SKIPREDUCE_BACKEND
        changes what ``"auto"`` means. Results have the same bits either way.

    Returns:
      An array of the shape and dtype of `x`; normalized integers come as floats, as in `lax.pmean`. The
      result is typed as the same on all workers, so it may leave ``shard_map`` as ``P()``.

    Raises:
      TypeError: `x` has a dtype that cannot be added, `num_skipped` or `shift` is no integer, or
        dropout has no key.
      ValueError: an axis is not bound, a count is out of range or differs between workers, a
        name is unknown, or ``backend="native"`` is not available.

    Example:
      Four simulated workers. Worker r contributes 2**r, so the bits of a sum name its contributors:
      with k=2 the workers j and j+1 are skipped in slice j.

      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> x = jnp.repeat(2.0 ** jnp.arange(4), 4).reshape(4, 4)
      >>> reduce = lambda x: sr.all_reduce(x, "data", num_skipped=2, normalize=None)
      >>> jax.vmap(reduce, axis_name="data")(x)[0]
      Array([12.,  9.,  3.,  6.], dtype=float32)

    References:
      SkipReduce, MICRO 2025: Algorithms 1 and 2, sections 4.2, 4.3 and 5.2.
    """
    group = Group.of(axis_name)
    x = jnp.asarray(x)
    check_dtype(x.dtype, "x")
    reduction = Reduction(
        num_skipped=num_skipped,
        shift=shift,
        normalize=normalize,
        mode=mode,
        key=key,
        num_gather_skipped=num_gather_skipped,
        wire=Wire.of(wire_dtype),
        backend=backend,
    ).checked(group)
    if x.size == 0:
        return normalized(lax.psum(x, group.names), normalize, group.size, group.size)
    (reduced,) = reduce_arrays([x], group, reduction)
    return reduced
