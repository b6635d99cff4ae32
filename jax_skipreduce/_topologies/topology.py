"""Topology: along which links an all-reduce runs, and what it leaves out. One file each.

A topology is data. `Topology.schedule` says who sends what to whom. The executor runs the schedule under a named axis,
`describe` and the benchmarks count the steps and bytes of the schedule, and the tests run the schedule in NumPy.
"""

from __future__ import annotations

import abc
import functools
from typing import ClassVar

from jax_skipreduce._topologies.schedule import Schedule


class Topology(abc.ABC):
    """The schedule of an all-reduce among N workers, for any N, with k of its steps left out.

    The vector has N slices. A schedule is defined at ``shift=0``. A shift c moves all slice indices by c, so the
    executor can take a traced shift.

    Attributes:
      name: the name in settings and messages.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abc.abstractmethod
    def schedule(self, num_workers: int, num_skipped: int = 0, shift: int = 0, num_gather_skipped: int = 0) -> Schedule:
        """The steps.

        Args:
          num_workers: N, at least 1.
          num_skipped: k, how much of the reduction is left out, 0..`max_skipped`.
          shift: c, added to every slice index, modulo N.
          num_gather_skipped: all-gather steps left out.

        Raises:
          ValueError: a count is out of range.
        """

    def max_skipped(self, num_workers: int) -> int:
        """The largest k."""
        return max(num_workers - 1, 0)

    def num_steps(self, num_workers: int, num_skipped: int = 0, num_gather_skipped: int = 0) -> int:
        """Steps on the wire, one after the other."""
        return len(self.schedule(num_workers, num_skipped, 0, num_gather_skipped).steps)

    def slices_sent(self, num_workers: int, num_skipped: int = 0, num_gather_skipped: int = 0) -> int:
        """Slices sent by the worker that sends most. Times the bytes of a slice: bytes on the wire."""
        return _slices_sent(self, num_workers, num_skipped, num_gather_skipped)


@functools.lru_cache(maxsize=1024)
def _slices_sent(topology: Topology, num_workers: int, num_skipped: int, num_gather_skipped: int) -> int:
    # A schedule of many workers is many transfers, and a description asks for each leaf.
    return max(topology.schedule(num_workers, num_skipped, 0, num_gather_skipped).slices_sent())
