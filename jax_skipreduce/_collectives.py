"""Runs the ring under a named axis: all_reduce, reduce_scatter, all_gather.

The same lines serve ``shard_map`` (check_vma on and off), ``pmap`` and ``vmap``, a static and a
traced number of skipped steps, one array and a bucket of many.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jax_skipreduce import _axes, _ring
from jax_skipreduce._axes import AxisName

Normalize = Literal["skip", "drop"]
Mode = Literal["skip", "dropout"]

# Up to so many steps stand one after the other in the program, more become a loop: the size of the
# program, and the time to compile it, does not grow with the number of workers.
_MAX_UNROLLED_STEPS = 16

_SUPPORTED = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The workers of a reduction and how they are typed. Made where it is used, inside the trace."""

    names: tuple[Hashable, ...]
    size: int
    tracked: bool

    @classmethod
    def of(cls, axis_name: AxisName) -> Ring:
        """The ring over `axis_name`, which is checked."""
        names = _axes.bound_axes(axis_name)
        return cls(names, lax.axis_size(names), _axes.is_tracked(names))

    @property
    def rank(self) -> jax.Array:
        """This worker's number, an int32 that varies over the axis."""
        return lax.axis_index(self.names)

    def send(self, x: jax.Array) -> jax.Array:
        """Passes `x` on to the next worker, returns what came from the previous one."""
        pairs = [(rank, _ring.next_rank(rank, self.size)) for rank in range(self.size)]
        return _in_own_dtype(lambda y: lax.ppermute(y, self.names, pairs), x)

    def gather(self, x: jax.Array) -> jax.Array:
        """The `x` of all workers on a new leading axis, by rank. Known to be the same on all of them."""
        if self.size == 1 and not self.tracked:
            return x[None]  # with tracking on, only a collective can say that all workers share it
        to = "invarying" if self.tracked else "varying"
        return _in_own_dtype(lambda y: lax.all_gather(y, self.names, to=to), x)


def _in_own_dtype(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``move(x)``, which moves values unchanged, with 16-bit floats as 16 bits on the wire.

    XLA's CPU backend widens the float16 and bfloat16 operands of a collective to float32, and
    sends twice the bytes. It leaves integers alone.
    """
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return move(x)

    @jax.custom_jvp
    def move_bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    # A bit cast has no derivative, but what is done here is linear.
    @move_bits.defjvp
    def move_bits_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return move_bits(*primals), move(*tangents)

    return move_bits(x)


def check_dtype(dtype: Any, what: str) -> None:
    """Raises TypeError, naming `what`, if values of `dtype` cannot be reduced."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)  # PRNG keys: no NumPy dtype
    if extended or jnp.dtype(dtype).name not in _SUPPORTED:
        raise TypeError(f"{what} has dtype {dtype}, which cannot be reduced. Cast it to one of {', '.join(_SUPPORTED)}")


def check_normalize(normalize: Any, allow_none: bool) -> None:
    """Raises ValueError if `normalize` is not a way to normalize."""
    if normalize not in (("skip", "drop", None) if allow_none else ("skip", "drop")):
        none = ", or None (the plain sum)" if allow_none else ""
        raise ValueError(
            f"normalize={normalize!r}: expected 'skip' (divide by the number of workers) or 'drop' "
            f"(divide by the number of contributors){none}"
        )


def scalar(name: str, value: Any, ring: Ring) -> int | jax.Array:
    """`value` as a Python int, or as a traced int32 that is the same on all workers."""
    if isinstance(value, Tracer):
        if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
            raise TypeError(f"{name} has type {jax.typeof(value)}: expected an integer scalar, such as int32[]")
        varying = sorted(map(str, _axes.varying_axes(value) & set(ring.names)))
        if varying:
            raise ValueError(
                f"{name} varies over {', '.join(varying)}: workers that disagree on it wait for each other "
                "for ever. Compute it from values that all workers share, such as a step counter"
            )
        return value.astype(jnp.int32)
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an integer") from None


def num_steps_skipped(name: str, value: Any, ring: Ring) -> int | jax.Array:
    """`value` as a number of skipped steps: checked where it is known, clamped to 0..N-1 where traced."""
    steps = scalar(name, value, ring)
    if isinstance(steps, int):
        if not 0 <= steps <= ring.size - 1:
            raise ValueError(f"{name}={steps}: expected 0..{ring.size - 1} for {ring.size} workers")
        return steps
    return jnp.clip(steps, 0, ring.size - 1)


def _loop(start: int | jax.Array, stop: int | jax.Array, body: Callable, carry: Any) -> Any:
    """`body(step, carry)` for start <= step < stop; a loop in the program where that is shorter."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= _MAX_UNROLLED_STEPS:
        for step in range(start, stop):
            carry = body(step, carry)
        return carry
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, carry)


def _accumulator(dtype: Any) -> Any:
    """What sums of `dtype` are added up in: float32 for the 16-bit floats, else the dtype itself."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def _divide(x: jax.Array, normalize: Normalize | None, num_workers: int, contributors: Any) -> jax.Array:
    """`x`, a sum over `contributors` workers, normalized. Integers give floats, as in `lax.pmean`."""
    if normalize is None:
        return x
    return x / (num_workers if normalize == "skip" else jnp.asarray(contributors).astype(x.real.dtype))


def _reduce(
    slices: jax.Array,
    ring: Ring,
    num_skipped: int | jax.Array,
    shift: int | jax.Array,
    normalize: Normalize | None,
    mode: Mode,
    key: jax.Array | None,
) -> jax.Array:
    """The reduce-scatter of `slices`, shape (N, S): this worker's own slice, reduced, shape (S,).

    Floats come normalized and in their own dtype. Integers come as exact sums.
    """
    size, rank = ring.size, ring.rank
    dtype = slices.dtype
    accumulator = _accumulator(dtype)
    slices = _axes.make_varying(slices, ring.names)

    def local(index: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(slices, index, axis=0, keepdims=False).astype(accumulator)

    keep = _keep_masks(key, 1 - num_skipped / size) if mode == "dropout" else None
    start = num_skipped if keep is None else 0

    def step(number: Any, total: jax.Array) -> jax.Array:
        received = ring.send(total.astype(dtype)).astype(accumulator)
        index = _ring.slice_to_receive(rank, number, shift, size)
        own = local(index)
        if keep is not None:
            own = jnp.where(keep(rank, index, own.shape), own, 0)
        return received + own

    total = _loop(start, size - 1, step, local(_ring.slice_to_send(rank, start, shift, size)))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return total
    contributors = size - num_skipped if keep is None else _num_kept(keep, ring, shift, total.shape)
    return _divide(total, normalize, size, contributors).astype(dtype)


def _keep_masks(key: jax.Array | None, probability: Any) -> Callable[[Any, Any, tuple[int, ...]], jax.Array]:
    """Algorithm 1's coin: which elements of its slice `index` the worker `rank` adds.

    A function of the shared key, the rank and the slice, so any worker can work out any mask.
    """
    assert key is not None  # all_reduce and skipreduce see to it

    def keep(rank: Any, index: Any, shape: tuple[int, ...]) -> jax.Array:
        own_key = jax.random.fold_in(jax.random.fold_in(key, rank), index)
        return jax.random.bernoulli(own_key, probability, shape)

    return keep


def _num_kept(keep: Callable, ring: Ring, shift: Any, shape: tuple[int, ...]) -> jax.Array:
    """How many workers contributed to each element of the slice that this worker owns."""
    index = _ring.owned_slice(ring.rank, shift, ring.size)

    def add(distance: Any, count: jax.Array) -> jax.Array:
        return count + keep((ring.rank - distance) % ring.size, index, shape).astype(jnp.int32)

    # The worker that sends first has nothing to add to, so it always contributes (Algorithm 1).
    first = _axes.make_varying(jnp.ones(shape, jnp.int32), ring.names)
    return _loop(0, ring.size - 1, add, first)


def _gather(own: jax.Array, ring: Ring, num_gather_skipped: int | jax.Array) -> jax.Array:
    """The slices of all workers by rank, shape (N, S); zeros for those that were not sent."""
    if isinstance(num_gather_skipped, int) and num_gather_skipped == 0:
        return ring.gather(own)
    size, rank = ring.size, ring.rank

    def step(number: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, passing = carry
        passing = ring.send(passing)
        source = (rank - number - 1) % size
        return lax.dynamic_update_index_in_dim(rows, passing, source, axis=0), passing

    rows = lax.dynamic_update_index_in_dim(jnp.zeros((size, *own.shape), own.dtype), own, rank, axis=0)
    return _loop(0, size - 1 - num_gather_skipped, step, (rows, own))[0]


def _by_slice(ring: Ring, shift: int | jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function rows by rank -> rows by slice: row j is the one of the worker that owns slice j."""
    if isinstance(shift, int):
        first = _ring.owner(0, shift, ring.size)
        return lambda rows: rows if first == 0 else jnp.concatenate([rows[first:], rows[:first]])
    # The owners could be computed; a sort makes XLA do that once, and not again in the copy of every leaf.
    owners = jnp.argsort(_ring.owned_slice(jnp.arange(ring.size, dtype=jnp.int32), shift, ring.size))
    return lambda rows: rows.at[owners].get(mode="promise_in_bounds", unique_indices=True)


def reduce_blocks(
    blocks: Sequence[jax.Array],
    ring: Ring,
    *,
    num_skipped: int | jax.Array = 0,
    shift: int | jax.Array = 0,
    normalize: Normalize | None = "skip",
    mode: Mode = "skip",
    key: jax.Array | None = None,
    num_gather_skipped: int | jax.Array = 0,
) -> list[jax.Array]:
    """All-reduces a bucket: blocks of one dtype, each of shape (N, S_i), whose rows j form slice j.

    One slice of sum(S_i) elements is on the wire per step. Arguments are those of `all_reduce`,
    checked already.

    Returns:
      The reduced blocks, in the shapes given.
    """
    bucket = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
    own = _reduce(bucket, ring, num_skipped, shift, normalize, mode, key)
    rows = _gather(own, ring, num_gather_skipped)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        rows = _divide(rows, normalize, ring.size, ring.size - num_skipped)
    by_slice, reduced, column = _by_slice(ring, shift), [], 0
    for block in blocks:
        # The rotation belongs to the copy out of the bucket, which is made anyway.
        part = lax.slice_in_dim(rows, column, column + block.shape[1], axis=1)
        reduced.append(by_slice(part))
        column += block.shape[1]
    return reduced


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
) -> jax.Array:
    """Sum or mean of `x` over the workers of an axis, with reduce-scatter steps left out.

    `x` is flattened, padded and cut in N slices. Slice j is reduced over N-k workers; the workers
    j-c, j-c+1, .., j-c+k-1 (mod N) are skipped, where k is `num_skipped` and c is `shift`. With
    ``num_skipped=0`` it is ``lax.pmean(x, axis_name)`` (``lax.psum`` with ``normalize=None``), in
    another order of additions.

    Bytes on the wire per worker: (2(N-1) - k) * ceil(x.size / N) * itemsize, so the collective
    gets 2(N-1) / (2(N-1) - k) times shorter. The reduce-scatter is N-1-k `lax.ppermute` steps, the
    all-gather one `lax.all_gather` (N-1 steps of the ring).

    float16 and bfloat16 are added up in float32 and sent in their own dtype, rounded once per step.
    All workers get the same bits, and get them again in every run.

    Args:
      x: array of any shape, the same on all workers: float16, bfloat16, float32, float64, complex or
        integer. A value that is typed as the same on all workers counts N times, as in `lax.psum`.
      axis_name: a mesh axis or a tuple of them (in any order); under `vmap` and `pmap` one axis.
      num_skipped: k, reduce-scatter steps left out, 0..N-1. An int, or a traced integer scalar that
        is the same on all workers: then one program serves all k, and a value out of range is
        clamped to it.
      shift: c, added to every slice index, modulo N. An int or a traced integer scalar that is the
        same on all workers.
      normalize: ``"skip"`` divides by N: what was skipped counts as zero. ``"drop"`` divides by the
        number of contributors, N-k. None gives the plain sum.
      mode: ``"skip"`` leaves out steps. ``"dropout"`` (Algorithm 1) is the fine-grained yardstick:
        every step is made, and each worker after the first adds each of its elements with
        probability 1 - k/N. It saves no bytes.
      key: PRNG key for ``mode="dropout"``, the same on all workers; a new one for each call.
      num_gather_skipped: all-gather steps left out, 0..N-1 (section 5.2; for comparison). **Replicas
        diverge**: worker r gets zeros for the reduced slices of the workers r+1, .., r+g, so each
        worker gets other values, and under ``check_vma=True`` the result is typed as varying. Saves
        g more steps.

    Returns:
      An array of the shape and dtype of `x`; integers that are normalized come as floats, as in
      `lax.pmean`. Typed as the same on all workers, so it may leave ``shard_map`` as ``P()``.

    Raises:
      TypeError: `x` has a dtype that cannot be added, `num_skipped` or `shift` is no integer, or
        dropout has no key.
      ValueError: an axis is not bound, a count is out of range or differs between workers, or a
        name is unknown.

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
    ring = Ring.of(axis_name)
    x = jnp.asarray(x)
    check_dtype(x.dtype, "x")
    check_normalize(normalize, allow_none=True)
    if mode not in ("skip", "dropout"):
        raise ValueError(f"mode={mode!r}: expected 'skip' or 'dropout'")
    if mode == "dropout" and key is None:
        raise TypeError("key=None: mode='dropout' needs a PRNG key, such as jax.random.key(step)")
    num_skipped = num_steps_skipped("num_skipped", num_skipped, ring)
    shift = scalar("shift", shift, ring)
    num_gather_skipped = num_steps_skipped("num_gather_skipped", num_gather_skipped, ring)
    if x.size == 0:
        return _divide(lax.psum(x, ring.names), normalize, ring.size, ring.size)
    (block,) = reduce_blocks(
        [to_block(x, ring.size)],
        ring,
        num_skipped=num_skipped,
        shift=shift,
        normalize=normalize,
        mode=mode,
        key=key,
        num_gather_skipped=num_gather_skipped,
    )
    return from_block(block, x.shape)


def reduce_scatter(
    x: jax.typing.ArrayLike,
    axis_name: AxisName,
    *,
    num_skipped: int | jax.Array = 0,
    shift: int | jax.Array = 0,
    normalize: Normalize | None = "skip",
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
    ring = Ring.of(axis_name)
    x = jnp.asarray(x)
    check_dtype(x.dtype, "x")
    check_normalize(normalize, allow_none=True)
    skipped = num_steps_skipped("num_skipped", num_skipped, ring)
    own = _reduce(to_block(x, ring.size), ring, skipped, scalar("shift", shift, ring), normalize, "skip", None)
    if not jnp.issubdtype(own.dtype, jnp.inexact):
        own = _divide(own, normalize, ring.size, ring.size - skipped)
    return own


def all_gather(
    x: jax.typing.ArrayLike,
    axis_name: AxisName,
    *,
    shift: int | jax.Array = 0,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """The second half of `all_reduce`: joins the slices that `reduce_scatter` gave to the workers.

    Bytes on the wire per worker: (N-1) * x.size * itemsize; one `lax.all_gather`.

    Args:
      x: this worker's slice, of any dtype and shape, the same on all workers.
      axis_name: a mesh axis or a tuple of them.
      shift: the `shift` that `reduce_scatter` was given: worker r holds slice (r + 1 + shift) mod N.
      shape: shape of the whole. Padding is cut off. None: 1-D, with the padding.

    Returns:
      An array of `shape`, typed as the same on all workers.

    Raises:
      ValueError: N slices of this size are not what an array of `shape` is cut in, or an axis is
        not bound.
      TypeError: `shift` is no integer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> halves = jnp.array([[3.0, 5.0], [7.0, 0.0]])
      >>> gather = lambda x: sr.all_gather(x, "data", shift=-1, shape=(3,))
      >>> jax.vmap(gather, axis_name="data")(halves)[0]
      Array([3., 5., 7.], dtype=float32)
    """
    ring = Ring.of(axis_name)
    x = jnp.asarray(x)
    shift = scalar("shift", shift, ring)
    if shape is not None and slice_size(prod(shape), ring.size) != x.size:
        raise ValueError(
            f"shape={tuple(shape)}: {prod(shape)} elements over {ring.size} workers make slices of "
            f"{slice_size(prod(shape), ring.size)} elements, but x has {x.size}"
        )
    x = _axes.make_varying(x, ring.names)
    rows = _by_slice(ring, shift)(ring.gather(x.reshape(-1)))
    return from_block(rows, (rows.size,) if shape is None else tuple(shape))
