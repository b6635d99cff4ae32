"""Runs the ring under a named axis: what the collectives, and buckets of many leaves, have in common.

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
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_skipreduce._topologies import ring as _ring
from jax_skipreduce._workers import axes as _axes
from jax_skipreduce._workers import wire as _wire
from jax_skipreduce._workers.axes import AxisName

Normalize = Literal["skip", "drop"]
Mode = Literal["skip", "dropout"]

# Up to so many steps stand one after the other in the program, more become a loop: the size of the
# program, and the time to compile it, does not grow with the number of workers.
_MAX_UNROLLED_STEPS = 16

# Blocks from this size on are read where they lie, slice by slice, and put together row by row. That is as fast as
# can be, but each row that is named takes time to compile and to start: smaller blocks are joined, and gathered.
_MIN_BYTES_LARGE = 2**20

_SUPPORTED = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The workers of a reduction. Made where it is used, inside the trace.

    Attributes:
      names: axes, in the order of the mesh.
      size: number of workers N.
      rank: this worker's number, an int32 that varies over the axes.
      tracked: whether JAX tracks which values vary over the axes.
      wire_dtype: what wider floats are sent as, and sent only: None for as they are.
    """

    names: tuple[Hashable, ...]
    size: int
    rank: jax.Array
    tracked: bool
    wire_dtype: Any = None

    @classmethod
    def of(cls, axis_name: AxisName, wire_dtype: Any = None) -> Ring:
        """The ring over `axis_name`, which is checked, as is `wire_dtype`."""
        names = _axes.bound_axes(axis_name)
        rank = lax.axis_index(names)
        return cls(names, lax.axis_size(names), rank, _axes.is_tracked(rank, names), _wire.check_wire_dtype(wire_dtype))

    def local(self, x: jax.Array) -> jax.Array:
        """`x`, typed as differing between workers."""
        return _axes.make_varying(x, self.names) if self.tracked else x

    def send(self, x: jax.Array, order: np.ndarray | None = None) -> jax.Array:
        """Passes `x` on to the next worker, returns what came from the previous one.

        `order` names all ranks, each after the one that it receives from. None: 0, 1, .., N-1.
        """
        ranks = list(range(self.size)) if order is None else order.tolist()
        pairs = [(rank, ranks[_ring.next_rank(place, self.size)]) for place, rank in enumerate(ranks)]
        return self._move(lambda y: lax.ppermute(y, self.names, pairs), x)

    def gather(self, x: jax.Array) -> jax.Array:
        """The `x` of all workers on a new leading axis, by rank. Known to be the same on all of them."""
        if self.size == 1 and not self.tracked:
            return x[None]  # with tracking on, only a collective can say that all workers share it
        to = "invarying" if self.tracked else "varying"
        return self._move(lambda y: lax.all_gather(y, self.names, to=to), x)

    def over(self, names: tuple[Hashable, ...]) -> Ring:
        """The workers along `names`, who send values as they are. Its rank is that of this ring: not for steps."""
        return dataclasses.replace(self, names=names, size=lax.axis_size(names), wire_dtype=None)

    def _move(self, move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """``move(x)``, rounded to what is sent."""
        return _wire.in_own_dtype(move, x.astype(self._sent_as(x))).astype(x.dtype)

    def round(self, x: jax.Array) -> jax.Array:
        """`x` as it would arrive."""
        return _wire.round_to(x, self._sent_as(x))

    def _sent_as(self, x: jax.Array) -> np.dtype:
        # One worker sends nothing, so it has nothing to round.
        return _wire.sent_dtype(x.dtype, self.wire_dtype) if self.size > 1 else x.dtype


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


def integer(name: str, value: Any, ring: Ring) -> int | jax.Array:
    """`value` as a Python int, or as a traced integer of 32 or 64 bits that is the same on all workers."""
    if isinstance(value, Tracer):
        if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
            raise TypeError(f"{name} has type {jax.typeof(value)}: expected an integer scalar, such as int32[]")
        varying = sorted(map(str, _axes.varying_axes(value) & set(ring.names)))
        if varying:
            raise ValueError(
                f"{name} varies over {', '.join(varying)}: workers that disagree on it wait for each other "
                "for ever. Compute it from values that all workers share, such as a step counter"
            )
        return value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an integer") from None


def slice_shift(name: str, value: Any, ring: Ring) -> int | jax.Array:
    """`value` as a shift: any integer, modulo N. An int, or a traced int32."""
    shift = integer(name, value, ring)
    if isinstance(shift, int):
        return shift % ring.size
    # Before anything is added to it: 2**32 is no multiple of N, so what overflows is another shift.
    return (shift % jnp.asarray(ring.size, shift.dtype)).astype(jnp.int32)


def num_steps_skipped(name: str, value: Any, ring: Ring) -> int | jax.Array:
    """`value` as a number of skipped steps: checked where it is known, clamped to 0..N-1 where traced."""
    steps = integer(name, value, ring)
    if isinstance(steps, int):
        if not 0 <= steps <= ring.size - 1:
            raise ValueError(f"{name}={steps}: expected 0..{ring.size - 1} for {ring.size} workers")
        return steps
    return jnp.clip(steps, 0, ring.size - 1).astype(jnp.int32)


def loop(start: int | jax.Array, stop: int | jax.Array, body: Callable, carry: Any) -> Any:
    """`body(step, carry)` for start <= step < stop; a loop in the program where that is shorter."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= _MAX_UNROLLED_STEPS:
        for step in range(start, stop):
            carry = body(step, carry)
        return carry
    # NumPy's int32: a bound that is known makes a loop that can be differentiated in reverse.
    first, end = (np.int32(bound) if isinstance(bound, int) else bound for bound in (start, stop))
    return lax.fori_loop(first, end, body, carry)


def accumulator(dtype: Any) -> Any:
    """What sums of `dtype` are added up in: float32 for the 16-bit floats, else the dtype itself."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def divide(x: jax.Array, normalize: Normalize | None, num_workers: int, contributors: Any) -> jax.Array:
    """`x`, a sum over `contributors` workers, normalized. Integers give floats, as in `lax.pmean`."""
    if normalize is None:
        return x
    if normalize == "skip":
        return x / num_workers
    # Small integers cannot count the workers, so both become what their quotient is.
    dtype = jax.eval_shape(lambda x: x / 1, x).dtype
    return x.astype(dtype) / jnp.asarray(contributors).astype(dtype)


def is_large(x: jax.Array) -> bool:
    """Whether `x` is worth being moved by itself."""
    return x.size * x.dtype.itemsize >= _MIN_BYTES_LARGE


def _large_first(blocks: Sequence[jax.Array]) -> list[int]:
    """The order in which `blocks` lie in a bucket."""
    return sorted(range(len(blocks)), key=lambda i: not is_large(blocks[i]))


def _slices_in_order_of_use(
    blocks: Sequence[jax.Array], ring: Ring, num_skipped: int | jax.Array, shift: int | jax.Array
) -> Callable[[Any], jax.Array]:
    """A function of a step s, from k on -> this worker's part of the slice that it sends in step s.

    What arrives in step s belongs to the slice that step s + 1 sends, or, after the last one, to the slice
    that this worker owns; so it is added to the part of step s + 1. Parts are those of the joined blocks,
    large ones first.
    """

    def slice_of(step: Any) -> Any:
        return _ring.slice_to_send(ring.rank, step, shift, ring.size)

    blocks = [ring.local(block) for block in blocks]
    readers = [(block, slice_of) for block in blocks if is_large(block)]
    small = [block for block in blocks if not is_large(block)]
    if len(small) > 1 and isinstance(num_skipped, int) and 2 * num_skipped >= ring.size:
        # N-k of N slices are all that is used. A gather is slower than a plain copy, but half of one is not.
        order = slice_of(jnp.arange(num_skipped, ring.size, dtype=jnp.int32))
        used = [block.at[order].get(mode="promise_in_bounds", unique_indices=True) for block in small]
        readers.append((jnp.concatenate(used, axis=1), lambda step: step - num_skipped))
    elif small:
        readers.append((jnp.concatenate(small, axis=1) if len(small) > 1 else small[0], slice_of))

    def part(step: Any) -> jax.Array:
        rows = [lax.dynamic_index_in_dim(block, row(step), axis=0, keepdims=False) for block, row in readers]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    return part


def reduce_slices(
    blocks: Sequence[jax.Array],
    ring: Ring,
    num_skipped: int | jax.Array,
    shift: int | jax.Array,
    normalize: Normalize | None,
    mode: Mode,
    key: jax.Array | None,
) -> jax.Array:
    """The reduce-scatter of the joined blocks: this worker's own slice, reduced, shape (S,).

    Floats come normalized and in their own dtype. Integers come as exact sums.
    """
    size, rank, dtype = ring.size, ring.rank, blocks[0].dtype
    wide = accumulator(dtype)
    keep = _keep_masks(key, 1 - num_skipped / size) if mode == "dropout" else None
    start = num_skipped if keep is None else 0
    local = _slices_in_order_of_use(blocks, ring, start, shift)

    def step(number: Any, total: jax.Array) -> jax.Array:
        received = ring.send(total.astype(dtype)).astype(wide)
        own = local(number + 1).astype(wide)
        if keep is not None:
            own = jnp.where(keep(rank, _ring.slice_to_receive(rank, number, shift, size), own.shape), own, 0)
        return received + own

    total = loop(start, size - 1, step, local(start).astype(wide))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return total
    contributors = size - num_skipped if keep is None else _num_kept(keep, ring, shift, total.shape)
    return divide(total, normalize, size, contributors).astype(dtype)


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
    first = ring.local(jnp.ones(shape, jnp.int32))
    return loop(0, ring.size - 1, add, first)


def _gather(own: jax.Array, ring: Ring, num_gather_skipped: int | jax.Array) -> jax.Array:
    """The slices of all workers by rank, shape (N, S); zeros for those that were not sent."""
    if isinstance(num_gather_skipped, int) and num_gather_skipped == 0:
        return ring.gather(own)
    size, rank, own = ring.size, ring.rank, ring.round(own)

    def step(number: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, passing = carry
        passing = ring.send(passing)
        source = (rank - number - 1) % size
        return lax.dynamic_update_index_in_dim(rows, passing, source, axis=0), passing

    rows = lax.dynamic_update_index_in_dim(jnp.zeros((size, *own.shape), own.dtype), own, rank, axis=0)
    return loop(0, size - 1 - num_gather_skipped, step, (rows, own))[0]


def by_slice(ring: Ring, shift: int | jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function rows by rank -> rows by slice: row j is the one of the worker that owns slice j."""
    if isinstance(shift, int):
        first = _ring.owner(0, shift, ring.size)
        return lambda rows: rows if first == 0 else jnp.concatenate([rows[first:], rows[:first]])
    # The owners could be computed; a sort makes XLA do that once, and not again in the copy of every leaf.
    owners = jnp.argsort(_ring.owned_slice(jnp.arange(ring.size, dtype=jnp.int32), shift, ring.size))

    def in_place(rows: jax.Array) -> jax.Array:
        if ring.size <= _MAX_UNROLLED_STEPS and is_large(rows):
            return jnp.concatenate([lax.dynamic_slice_in_dim(rows, owners[j], 1) for j in range(ring.size)])
        return rows.at[owners].get(mode="promise_in_bounds", unique_indices=True)

    return in_place


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
    own = reduce_slices(blocks, ring, num_skipped, shift, normalize, mode, key)
    rows = _gather(own, ring, num_gather_skipped)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        rows = divide(rows, normalize, ring.size, ring.size - num_skipped)
    in_place, column = by_slice(ring, shift), 0
    reduced: dict[int, jax.Array] = {}
    for i in _large_first(blocks):
        # The rotation belongs to the copy out of the bucket, which is made anyway.
        part = lax.slice_in_dim(rows, column, column + blocks[i].shape[1], axis=1)
        reduced[i] = in_place(part)
        column += blocks[i].shape[1]
    return [reduced[i] for i in range(len(blocks))]


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
