"""The ring of `lax.ppermute`s, under a named axis: how a reduction runs wherever JAX does.

The same lines serve ``shard_map`` (check_vma on and off), ``pmap`` and ``vmap``, a static and a
traced number of skipped steps, one array and a bucket of many. Other topologies than the ring go through `scheduled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends import scheduled
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._topologies import ring
from jax_skipreduce._workers.blocks import from_block, is_large, to_block
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.loop import MAX_UNROLLED_STEPS, loop
from jax_skipreduce._workers.mean import accumulator, normalized


def reduce_by_ppermute(arrays: Sequence[jax.Array], group: Group, reduction: Reduction) -> list[jax.Array]:
    """All-reduces arrays of one dtype, each cut in N slices of its own. None of them is empty."""
    blocks = reduce_blocks([to_block(array, group.size) for array in arrays], group, reduction)
    return [from_block(block, array.shape) for block, array in zip(blocks, arrays, strict=True)]


def reduce_blocks(blocks: Sequence[jax.Array], group: Group, reduction: Reduction) -> list[jax.Array]:
    """All-reduces a bucket: blocks of one dtype, each of shape (N, S_i), whose rows j form slice j.

    One slice of sum(S_i) elements is on the wire per step.

    Returns:
      The reduced blocks, in the shapes given.
    """
    if not isinstance(reduction.topology, ring.Ring):
        return scheduled.reduce_blocks(blocks, group, reduction)
    own = reduce_slices(blocks, group, reduction)
    rows = _gather(own, Channel(group, reduction.wire), reduction.num_gather_skipped)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        rows = normalized(rows, reduction.normalize, group.size, group.size - reduction.num_skipped)
    rotate, column = rows_by_slice(group, reduction.shift), 0
    reduced: dict[int, jax.Array] = {}
    for i in _large_first(blocks):
        # The rotation is a part of the copy out of the bucket, which is made anyway.
        part = lax.slice_in_dim(rows, column, column + blocks[i].shape[1], axis=1)
        reduced[i] = rotate(part)
        column += blocks[i].shape[1]
    return [reduced[i] for i in range(len(blocks))]


def reduce_slices(blocks: Sequence[jax.Array], group: Group, reduction: Reduction) -> jax.Array:
    """The reduce-scatter of the joined blocks: this worker's own slice, reduced, shape (S,).

    Floats come normalized and in their own dtype. Integers come as exact sums.
    """
    size, rank, dtype = group.size, group.rank, blocks[0].dtype
    num_skipped, shift = reduction.num_skipped, reduction.shift
    channel, pairs, wide = Channel(group, reduction.wire), ring.ring_pairs(range(size)), accumulator(dtype)
    keep = _keep_masks(reduction.key, 1 - num_skipped / size) if reduction.mode == "dropout" else None
    start = num_skipped if keep is None else 0
    local = _slices_in_order_of_use(blocks, group, start, shift)

    def step(number: Any, total: jax.Array) -> jax.Array:
        received = channel.permute(total.astype(dtype), pairs).astype(wide)
        own = local(number + 1).astype(wide)
        if keep is not None:
            own = jnp.where(keep(rank, ring.slice_to_receive(rank, number, shift, size), own.shape), own, 0)
        return received + own

    total = loop(start, size - 1, step, local(start).astype(wide))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return total
    contributors = size - num_skipped if keep is None else _num_kept(keep, group, shift, total.shape)
    return normalized(total, reduction.normalize, size, contributors).astype(dtype)


def rows_by_slice(group: Group, shift: int | jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function rows by rank -> rows by slice: row j of the result comes from the worker that owns slice j."""
    if isinstance(shift, int):
        first = ring.owner(0, shift, group.size)
        return lambda rows: rows if first == 0 else jnp.concatenate([rows[first:], rows[:first]])
    # Arithmetic would give the owners, too. XLA does not fuse a sort, so the sort runs once, not in every leaf's copy.
    owners = jnp.argsort(ring.owned_slice(jnp.arange(group.size, dtype=jnp.int32), shift, group.size))

    def rotate(rows: jax.Array) -> jax.Array:
        if group.size <= MAX_UNROLLED_STEPS and is_large(rows):
            return jnp.concatenate([lax.dynamic_slice_in_dim(rows, owners[j], 1) for j in range(group.size)])
        return rows.at[owners].get(mode="promise_in_bounds", unique_indices=True)

    return rotate


def _large_first(blocks: Sequence[jax.Array]) -> list[int]:
    """The order in which `blocks` lie in a bucket."""
    return sorted(range(len(blocks)), key=lambda i: not is_large(blocks[i]))


def _slices_in_order_of_use(
    blocks: Sequence[jax.Array], group: Group, num_skipped: int | jax.Array, shift: int | jax.Array
) -> Callable[[Any], jax.Array]:
    """A function of a step s, from k on -> this worker's part of the slice that it sends in step s.

    The slice that arrives in step s is the one that step s + 1 sends (after the last step, the slice that this worker
    owns). So the part of step s + 1 is added to it. Parts are parts of the joined blocks, large blocks first.
    """

    def slice_of(step: Any) -> Any:
        return ring.slice_to_send(group.rank, step, shift, group.size)

    blocks = [group.local(block) for block in blocks]
    readers = [(block, slice_of) for block in blocks if is_large(block)]
    small = [block for block in blocks if not is_large(block)]
    if len(small) > 1 and isinstance(num_skipped, int) and 2 * num_skipped >= group.size:
        # Only N-k of N slices are used. A gather is slower than a plain copy, but a gather of half of the rows is not.
        order = slice_of(jnp.arange(num_skipped, group.size, dtype=jnp.int32))
        used = [block.at[order].get(mode="promise_in_bounds", unique_indices=True) for block in small]
        readers.append((jnp.concatenate(used, axis=1), lambda step: step - num_skipped))
    elif small:
        readers.append((jnp.concatenate(small, axis=1) if len(small) > 1 else small[0], slice_of))

    def part(step: Any) -> jax.Array:
        rows = [lax.dynamic_index_in_dim(block, row(step), axis=0, keepdims=False) for block, row in readers]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    return part


def _keep_masks(key: jax.Array | None, probability: Any) -> Callable[[Any, Any, tuple[int, ...]], jax.Array]:
    """Algorithm 1's coin: which elements of its slice `index` the worker `rank` adds.

    The masks depend on the shared key, the rank and the slice, so any worker can compute any mask.
    """
    assert key is not None  # all_reduce and skipreduce check that

    def keep(rank: Any, index: Any, shape: tuple[int, ...]) -> jax.Array:
        own_key = jax.random.fold_in(jax.random.fold_in(key, rank), index)
        return jax.random.bernoulli(own_key, probability, shape)

    return keep


def _num_kept(keep: Callable, group: Group, shift: Any, shape: tuple[int, ...]) -> jax.Array:
    """The number of workers that contributed to each element of the slice that this worker owns."""
    index = ring.owned_slice(group.rank, shift, group.size)

    def add(distance: Any, count: jax.Array) -> jax.Array:
        return count + keep((group.rank - distance) % group.size, index, shape).astype(jnp.int32)

    # The worker that sends first has nothing to add to, so it always contributes (Algorithm 1).
    first = group.local(jnp.ones(shape, jnp.int32))
    return loop(0, group.size - 1, add, first)


def _gather(own: jax.Array, channel: Channel, num_gather_skipped: int | jax.Array) -> jax.Array:
    """The slices of all workers by rank, shape (N, S); zeros for those that were not sent."""
    if isinstance(num_gather_skipped, int) and num_gather_skipped == 0:
        return channel.gather(own)
    size, rank, own = channel.group.size, channel.group.rank, channel.round(own)
    pairs = ring.ring_pairs(range(size))

    def step(number: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, passing = carry
        passing = channel.permute(passing, pairs)
        source = (rank - number - 1) % size
        return lax.dynamic_update_index_in_dim(rows, passing, source, axis=0), passing

    rows = lax.dynamic_update_index_in_dim(jnp.zeros((size, *own.shape), own.dtype), own, rank, axis=0)
    return loop(0, size - 1 - num_gather_skipped, step, (rows, own))[0]
