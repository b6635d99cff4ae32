"""The ring, with skipping: which slice a worker sends, receives and ends up owning.

Algorithm 2 of the paper, with the shift of its section 4.3. The functions use plain operators
alone, so that Python ints, NumPy arrays and JAX tracers go through the same lines; ``%`` is the
modulo with a non-negative result in all three.

In the words of the paper: with `num_skipped` = k and `shift` = c, slice j is reduced over the N-k
workers j-c+k, .., j-c+N-1 (mod N); the k workers j-c, .., j-c+k-1 are skipped; worker j-c-1 owns
the result.
"""

from __future__ import annotations

from typing import Any

from jax_skipreduce._topologies.schedule import Schedule, Transfer


def next_rank(rank: Any, num_workers: int) -> Any:
    """The neighbour that `rank` sends to, in every step."""
    return (rank + 1) % num_workers


def slice_to_send(rank: Any, step: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` sends in reduce-scatter step `step` (k..N-2)."""
    return (rank - step + shift) % num_workers


def slice_to_receive(rank: Any, step: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` receives in reduce-scatter step `step`, and adds its own to."""
    return (rank - step - 1 + shift) % num_workers


def owned_slice(rank: Any, shift: Any, num_workers: int) -> Any:
    """Slice that `rank` holds, reduced, when the reduce-scatter ends. Does not depend on k."""
    return (rank + 1 + shift) % num_workers


def owner(slice_index: Any, shift: Any, num_workers: int) -> Any:
    """Rank that holds slice `slice_index`, reduced, when the reduce-scatter ends."""
    return (slice_index - 1 - shift) % num_workers


def num_wire_steps(num_workers: int, num_skipped: int = 0, num_gather_skipped: int = 0) -> int:
    """Steps on the wire of one all-reduce: 2(N-1) - k, each one slice per worker."""
    return 2 * (num_workers - 1) - num_skipped - num_gather_skipped


def ring_schedule(num_workers: int, num_skipped: int = 0, shift: int = 0, num_gather_skipped: int = 0) -> Schedule:
    """The ring all-reduce of `num_workers` workers as data.

    Args:
      num_workers: N, at least 1. The vector has N slices.
      num_skipped: k, reduce-scatter steps left out, 0..N-1.
      shift: c, added to every slice index (any int; counts modulo N).
      num_gather_skipped: all-gather steps left out at the end, 0..N-1 (section 5.2).

    Raises:
      ValueError: a count is out of range.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: expected at least 1")
    for name, value in (("num_skipped", num_skipped), ("num_gather_skipped", num_gather_skipped)):
        if not 0 <= value <= num_workers - 1:
            raise ValueError(f"{name}={value}: expected 0..{num_workers - 1} for {num_workers} workers")
    ranks = range(num_workers)
    scatter = tuple(
        tuple(
            Transfer(r, next_rank(r, num_workers), slice_to_send(r, step, shift, num_workers), "reduce") for r in ranks
        )
        for step in range(num_skipped, num_workers - 1)
    )
    gather = tuple(
        tuple(Transfer(r, next_rank(r, num_workers), owned_slice(r - step, shift, num_workers), "copy") for r in ranks)
        for step in range(num_workers - 1 - num_gather_skipped)
    )
    return Schedule(num_workers, num_workers, scatter + gather)
