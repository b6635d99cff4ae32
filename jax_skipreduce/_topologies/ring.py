"""The ring, with skipping: which slice a worker sends, receives and ends up owning.

Algorithm 2 of the paper, with the shift of its section 4.3. The functions use plain operators
alone, so that Python ints, NumPy arrays and JAX tracers go through the same lines; ``%`` is the
modulo with a non-negative result in all three.

In the words of the paper: with `num_skipped` = k and `shift` = c, slice j is reduced over the N-k
workers j-c+k, .., j-c+N-1 (mod N); the k workers j-c, .., j-c+k-1 are skipped; worker j-c-1 owns
the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jax_skipreduce._topologies.schedule import Schedule, Transfer
from jax_skipreduce._topologies.topology import Topology


def next_rank(rank: Any, num_workers: int) -> Any:
    """The neighbour that `rank` sends to, in every step."""
    return (rank + 1) % num_workers


def ring_pairs(order: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) of every worker in a ring that goes through the ranks in this order."""
    return [(rank, order[next_rank(place, len(order))]) for place, rank in enumerate(order)]


def slice_to_send(rank: Any, step: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` sends in reduce-scatter step `step` (k..N-2)."""
    return (rank - step + shift) % num_workers


def slice_to_receive(rank: Any, step: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` receives in reduce-scatter step `step`, and adds its own slice to."""
    return (rank - step - 1 + shift) % num_workers


def owned_slice(rank: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` holds, reduced, when the reduce-scatter ends. Does not depend on k."""
    return (rank + 1 + shift) % num_workers


def owner(slice_index: Any, shift: Any, num_workers: int) -> Any:
    """Rank that holds slice `slice_index`, reduced, when the reduce-scatter ends."""
    return (slice_index - 1 - shift) % num_workers


class Ring(Topology):
    """2(N-1) - k steps, each one slice per worker to the next worker."""

    name: ClassVar[str] = "ring"

    def schedule(self, num_workers: int, num_skipped: int = 0, shift: int = 0, num_gather_skipped: int = 0) -> Schedule:
        """The ring all-reduce as data; see `Topology.schedule`. Both counts are 0..N-1."""
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: expected at least 1")
        for name, value in (("num_skipped", num_skipped), ("num_gather_skipped", num_gather_skipped)):
            if not 0 <= value <= num_workers - 1:
                raise ValueError(f"{name}={value}: expected 0..{num_workers - 1} for {num_workers} workers")
        ranks = range(num_workers)
        scatter = tuple(
            tuple(
                Transfer(r, next_rank(r, num_workers), slice_to_send(r, step, shift, num_workers), "reduce")
                for r in ranks
            )
            for step in range(num_skipped, num_workers - 1)
        )
        gather = tuple(
            tuple(
                Transfer(r, next_rank(r, num_workers), owned_slice(r - step, shift, num_workers), "copy") for r in ranks
            )
            for step in range(num_workers - 1 - num_gather_skipped)
        )
        return Schedule(num_workers, num_workers, scatter + gather)

    # Both counts have closed forms, because a schedule of thousands of workers is millions of transfers. A test
    # compares the closed forms with the schedule.

    def num_steps(self, num_workers: int, num_skipped: int = 0, num_gather_skipped: int = 0) -> int:
        """2(N-1) - k - g."""
        return 2 * (num_workers - 1) - num_skipped - num_gather_skipped

    def slices_sent(self, num_workers: int, num_skipped: int = 0, num_gather_skipped: int = 0) -> int:
        """One per step."""
        return self.num_steps(num_workers, num_skipped, num_gather_skipped)


RING = Ring()
