"""Runs the schedule of any topology by `lax.ppermute`, transfer by transfer.

The ring has an executor of its own, which copies less (`ppermute`). This executor reads `Topology.schedule` and nothing
else, so a new topology runs as soon as its schedule is written down.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._topologies.schedule import Transfer
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import accumulator, normalized


def reduce_blocks(blocks: Sequence[jax.Array], group: Group, reduction: Reduction) -> list[jax.Array]:
    """All-reduces a bucket as `reduction.topology` says; see `ppermute.reduce_blocks`.

    Raises:
      ValueError: the reduction asks for what only the ring does: dropout, or skipped all-gather steps.
    """
    topology = reduction.topology
    if reduction.mode != "skip":
        raise ValueError(f"mode={reduction.mode!r}: topology {topology.name!r} has no dropout, only topology='ring'")
    if not isinstance(reduction.num_gather_skipped, int) or reduction.num_gather_skipped:
        raise ValueError(
            f"num_gather_skipped={reduction.num_gather_skipped}: topology {topology.name!r} gathers in full, only "
            "topology='ring' leaves out steps there"
        )
    widths = [block.shape[1] for block in blocks]
    # With a shift of c, slice j of the schedule is slice j + c of the vector: the rows move, and the schedule stays.
    moved = jnp.roll(jnp.concatenate(blocks, axis=1), -reduction.shift, axis=0)
    if isinstance(reduction.num_skipped, int):
        rows = _reduce_rows(moved, group, reduction, reduction.num_skipped)
    else:
        counts = range(topology.max_skipped(group.size) + 1)
        branches = [lambda rows, k=k: _reduce_rows(rows, group, reduction, k) for k in counts]
        rows = lax.switch(reduction.num_skipped, branches, moved)
    back = jnp.roll(rows, reduction.shift, axis=0)
    return jnp.split(back, np.cumsum(widths)[:-1], axis=1)


def _reduce_rows(rows: jax.Array, group: Group, reduction: Reduction, num_skipped: int) -> jax.Array:
    """The reduced rows of all slices, typed as the same on all workers."""
    schedule = reduction.topology.schedule(group.size, num_skipped)
    if (schedule.num_workers, schedule.num_slices) != (group.size, group.size):
        raise ValueError(
            f"topology {reduction.topology.name!r} has a schedule of {schedule.num_slices} slices for "
            f"{schedule.num_workers} workers: expected {group.size} of both"
        )
    channel, dtype = Channel(group, reduction.wire), rows.dtype
    held = group.local(rows).astype(accumulator(dtype))
    for step in schedule.reduce_steps:
        held = _run_step(step, held, channel, dtype)
    contributors = np.array([[len(workers) for workers in row] for row in schedule.contributors()], np.int32)
    own = jnp.asarray(contributors)[group.rank]
    # Only the slices that a worker owns are used from here on. Other rows of `held` are partial sums.
    means = normalized(held, reduction.normalize, group.size, own[:, None])
    if jnp.issubdtype(dtype, jnp.inexact):
        means = means.astype(dtype)
    owners = np.array(schedule.owners(), np.int32)
    if sorted(owners.tolist()) == list(range(group.size)):
        # Every worker owns one slice, so one all-gather does. JAX knows its result to be the same everywhere.
        slice_of = np.argsort(owners).astype(np.int32)
        mine = lax.dynamic_index_in_dim(means, jnp.asarray(slice_of)[group.rank], axis=0, keepdims=False)
        return channel.gather(mine)[owners]
    if lacking := schedule.lacking():
        raise ValueError(f"topology {reduction.topology.name!r}: worker {lacking[0]} never gets slice {lacking[1]}")
    is_mine = (jnp.asarray(owners) == group.rank)[:, None]
    for step in schedule.copy_steps:
        means = _run_step(step, means, channel, means.dtype)
    if not group.tracked:
        return means
    # A chain of ppermutes does not tell JAX that all workers hold the same. A sum does, for one more all-reduce.
    return lax.psum(jnp.where(is_mine, means, jnp.zeros((), means.dtype)), group.names)


def _run_step(step: Sequence[Transfer], held: jax.Array, channel: Channel, dtype: Any) -> jax.Array:
    """The rows of all slices that this worker holds after `step`, in the dtype of `held`. They are sent as `dtype`."""
    group, before = channel.group, held
    for pairs, transfers in _rounds(step):
        sent, received, operation = _tables(transfers, group.size)
        payload = before[jnp.asarray(sent)[group.rank]].astype(dtype)
        arrived = channel.permute(payload, _completed(pairs, group)).astype(held.dtype)
        if step[0].operation == "copy":
            # A worker that passes a reduced slice on keeps the rounded values that arrive elsewhere.
            rounded = channel.round(payload).astype(held.dtype)
            places = jnp.asarray(sent)[group.rank]
            sends = jnp.asarray(np.isin(np.arange(group.size), [source for source, _ in pairs]))[group.rank]
            held = held.at[places].set(jnp.where(sends, rounded, held[places]))
        places = jnp.asarray(received)[group.rank]
        own = before[places] if step[0].operation == "reduce" else held[places]
        new = arrived + own if step[0].operation == "reduce" else arrived
        held = held.at[places].set(jnp.where(jnp.asarray(operation)[group.rank], new, held[places]))
    return held


def _rounds(step: Sequence[Transfer]) -> list[tuple[list[tuple[int, int]], list[list[Transfer]]]]:
    """The transfers of a step as permutations: pairs (source, target), and what each pair carries.

    A ppermute sends from each worker to at most one other, as much as every other pair carries.
    """
    by_pair: dict[tuple[int, int], list[Transfer]] = collections.defaultdict(list)
    for transfer in step:
        by_pair[transfer.source, transfer.target].append(transfer)
    rounds: list[tuple[list[tuple[int, int]], list[list[Transfer]]]] = []
    for pair, transfers in by_pair.items():
        for pairs, carried in rounds:
            if len(carried[0]) == len(transfers) and all(pair[0] != s and pair[1] != t for s, t in pairs):
                pairs.append(pair)
                carried.append(transfers)
                break
        else:
            rounds.append(([pair], [transfers]))
    return rounds


def _tables(carried: Sequence[Sequence[Transfer]], num_workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By rank: the slices that it sends and those that it receives, shape (N, M); whether it receives, (N, 1, 1)."""
    num_slices = len(carried[0])
    sent, received = np.zeros((2, num_workers, num_slices), np.int32)
    # A worker without a pair writes its own rows back. Places differ, because a row may be set only once.
    sent[:] = received[:] = np.arange(num_slices)
    receives = np.zeros((num_workers, 1, 1), bool)
    for transfers in carried:
        indices = [transfer.slice_index for transfer in transfers]
        sent[transfers[0].source], received[transfers[0].target] = indices, indices
        receives[transfers[0].target] = True
    return sent, received, receives


def _completed(pairs: list[tuple[int, int]], group: Group) -> list[tuple[int, int]]:
    """`pairs`, completed to a whole permutation under `jax.vmap`, which wants one."""
    if len(pairs) == group.size or not group.is_simulated:
        return pairs
    sources = [rank for rank in range(group.size) if rank not in {source for source, _ in pairs}]
    targets = [rank for rank in range(group.size) if rank not in {target for _, target in pairs}]
    return [*pairs, *zip(sources, targets, strict=True)]
