"""Where the time of a step goes: compute, exposed communication, overhead (Fig. 13).

Three programs are timed: the step as it is; the same with nothing on the wire (`_stand_ins`); and the one that hands
local gradients straight to the optimizer. Then

    compute                = the last one
    overhead               = nothing on the wire - compute
    exposed communication  = the step - nothing on the wire

Overhead is what a method computes by itself: buckets, slices, sums, shifts, casts. It is an upper bound, because the
stand-in of a gather still writes the whole result. Communication is exposed all of it, as far as the backward pass
does not hide it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jax_skipreduce.programs.tta._records import Timings
from jax_skipreduce.programs.tta._training import Trainer, Variant


def measure(trainer: Trainer, methods: Sequence[str], num_rounds: int) -> Timings:
    """Times all three programs of each method, one after the other in a new order in each round.

    All workers start each step together, and it ends when the last one is done.
    """
    cluster, seed = trainer.cluster, trainer.settings.seeds[0]
    batches, _ = trainer.batches(seed)
    variants: tuple[Variant, ...] = ("step", "local")
    entries: list[tuple[str, Variant]] = [(name, variant) for name in methods for variant in variants]
    entries.append((methods[0], "compute"))
    # A state for each structure, not for each program: what is computed does not matter here.
    starts = {name: trainer.start(name, seed) for name in methods}
    structures = {name: _structure(start) for name, start in starts.items()}
    states = {structures[name]: start for name, start in starts.items()}
    programs = [trainer.program(name, variant, states[structures[name]], batches) for name, variant in entries]
    del starts

    def make_step(number: int) -> float:
        structure = structures[entries[number][0]]
        cluster.barrier()
        start = time.perf_counter()
        states[structure] = jax.block_until_ready(programs[number](states[structure], batches))
        return time.perf_counter() - start

    for number in range(len(entries)):
        make_step(number)
    own: list[list[float]] = [[] for _ in entries]
    orders = np.random.default_rng(seed)
    for _ in range(num_rounds):
        for number in orders.permutation(len(entries)).tolist():
            own[number].append(make_step(number))
    flat = [value for values in own for value in values]
    last = cluster.gather(lambda _: flat).max(0).reshape(len(entries), num_rounds)
    by_entry = {entry: tuple(row.tolist()) for entry, row in zip(entries, last, strict=True)}
    return Timings(
        compute=by_entry[entries[-1]],
        step={name: by_entry[name, "step"] for name in methods},
        local={name: by_entry[name, "local"] for name in methods},
    )


def _structure(tree: Any) -> Hashable:
    """The structure of a pytree, with the shapes and dtypes of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a step, in seconds. They are medians, so noise may make a small one negative."""

    compute: float
    communication: float
    overhead: float

    @property
    def step(self) -> float:
        """The whole."""
        return self.compute + self.communication + self.overhead

    @property
    def share_of_communication(self) -> float:
        """Share of the step that is exposed communication."""
        return self.communication / self.step


def break_down(timings: Timings) -> dict[str, Parts]:
    """The parts of each method's step."""
    compute = statistics.median(timings.compute)
    parts = {}
    for name, steps in timings.step.items():
        local = statistics.median(timings.local[name])
        parts[name] = Parts(compute, statistics.median(steps) - local, local - compute)
    return parts
