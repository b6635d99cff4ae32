"""A schedule: who sends which slice to whom, step by step, as plain data.

Nothing in this file knows JAX. The executors, the NumPy reference and the byte counts of `describe` and the benchmarks
all read the same `Schedule`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Operation = Literal["reduce", "copy"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One slice on its way from one worker to another.

    Attributes:
      source: rank of the sender.
      target: rank of the receiver.
      slice_index: which of the vector's slices travels, 0..num_slices-1.
      operation: ``"reduce"`` adds what arrives to the receiver's own slice, ``"copy"`` replaces it.
    """

    source: int
    target: int
    slice_index: int
    operation: Operation


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of one collective: first those that reduce, then those that copy.

    Transfers of one step happen at the same time: each reads what its sender held before the step.

    Attributes:
      num_workers: number of workers N, ranks 0..N-1.
      num_slices: number of slices that the vector is cut in.
      steps: one tuple of transfers per step.
    """

    num_workers: int
    num_slices: int
    steps: tuple[tuple[Transfer, ...], ...]

    def __post_init__(self) -> None:
        copies = False
        for number, step in enumerate(self.steps):
            written = set()
            for transfer in step:
                for end in (transfer.source, transfer.target):
                    if not 0 <= end < self.num_workers:
                        raise ValueError(f"step {number}: worker {end} is not in 0..{self.num_workers - 1}: {transfer}")
                if transfer.source == transfer.target:
                    raise ValueError(f"step {number}: a worker sends to itself: {transfer}")
                if not 0 <= transfer.slice_index < self.num_slices:
                    raise ValueError(
                        f"step {number}: slice {transfer.slice_index} is not in 0..{self.num_slices - 1}: {transfer}"
                    )
                place = (transfer.target, transfer.slice_index)
                if place in written:
                    raise ValueError(
                        f"step {number}: slice {place[1]} of worker {place[0]} is written twice, "
                        "so the result would depend on the order"
                    )
                written.add(place)
                if transfer.operation == "reduce" and copies:
                    raise ValueError(f"step {number}: it reduces after a step that copies: {transfer}")
            copies = copies or any(transfer.operation == "copy" for transfer in step)
            if copies and any(transfer.operation == "reduce" for transfer in step):
                raise ValueError(f"step {number}: it reduces and copies; expected one of them")

    @property
    def reduce_steps(self) -> tuple[tuple[Transfer, ...], ...]:
        """The reduce-scatter: the steps that add."""
        return tuple(step for step in self.steps if step and step[0].operation == "reduce")

    @property
    def copy_steps(self) -> tuple[tuple[Transfer, ...], ...]:
        """The all-gather: the steps that hand reduced slices on."""
        return tuple(step for step in self.steps if step and step[0].operation == "copy")

    def slices_sent(self) -> tuple[int, ...]:
        """Slices that each worker puts on the wire, by rank. Times the bytes of a slice: bytes on the wire."""
        sent = [0] * self.num_workers
        for step in self.steps:
            for transfer in step:
                sent[transfer.source] += 1
        return tuple(sent)

    def contributors(self) -> tuple[tuple[frozenset[int], ...], ...]:
        """The contributors of slice j on worker r when the steps that reduce are over: entry [r][j].

        Raises:
          ValueError: a worker is added to one slice twice.
        """
        held = [[frozenset([rank])] * self.num_slices for rank in range(self.num_workers)]
        for number, step in enumerate(self.reduce_steps):
            before = [list(row) for row in held]
            for transfer in step:
                j = transfer.slice_index
                arrived, own = before[transfer.source][j], before[transfer.target][j]
                if both := arrived & own:
                    raise ValueError(f"step {number}: worker {min(both)} is in slice {j} twice: {transfer}")
                held[transfer.target][j] = arrived | own
        return tuple(map(tuple, held))

    def lacking(self) -> tuple[int, int] | None:
        """A worker and a slice that it never gets from the slice's owner; None if all get all."""
        has = [{j for j, owner in enumerate(self.owners()) if owner == rank} for rank in range(self.num_workers)]
        for step in self.copy_steps:
            before = [set(slices) for slices in has]
            for transfer in step:
                if transfer.slice_index in before[transfer.source]:
                    has[transfer.target].add(transfer.slice_index)
        missing = ((rank, j) for rank in range(self.num_workers) for j in range(self.num_slices) if j not in has[rank])
        return next(missing, None)

    def owners(self) -> tuple[int, ...]:
        """The worker that holds each slice, reduced, when the steps that reduce are over.

        The owner is the first worker that sends the slice in a copy. Without a copy it is the worker whose slice has
        the most contributors.
        """
        first: dict[int, int] = {}
        for step in self.copy_steps:
            for transfer in step:
                first.setdefault(transfer.slice_index, transfer.source)
        held = self.contributors()
        most = [max(range(self.num_workers), key=lambda r: len(held[r][j])) for j in range(self.num_slices)]
        return tuple(first.get(j, most[j]) for j in range(self.num_slices))
