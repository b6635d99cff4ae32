"""What a collective does, as plain data: who sends which slice to whom, step by step.

Nothing here knows JAX. The executor, the NumPy reference, the tables of bytes and the benchmarks
all speak of the same `Schedule`.
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
    """The steps of one collective.

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

    def slices_sent(self) -> tuple[int, ...]:
        """Slices that each worker puts on the wire, by rank. Times the bytes of a slice: its wire bytes."""
        sent = [0] * self.num_workers
        for step in self.steps:
            for transfer in step:
                sent[transfer.source] += 1
        return tuple(sent)
