"""Runs a schedule in NumPy, on the slices of all workers at once. The oracle of the tests."""

from __future__ import annotations

import numpy as np

from jax_skipreduce._schedule import Schedule


def run(schedule: Schedule, slices: np.ndarray) -> np.ndarray:
    """What every worker holds after the schedule.

    Args:
      schedule: the steps to run.
      slices: shape (num_workers, num_slices, ...), what each worker holds before.

    Returns:
      An array of the same shape and dtype.

    Raises:
      ValueError: `slices` does not have a row per worker and a column per slice.
    """
    expected = (schedule.num_workers, schedule.num_slices)
    if slices.shape[:2] != expected:
        raise ValueError(f"slices.shape={slices.shape}: expected it to begin with {expected}")
    held = slices.copy()
    for step in schedule.steps:
        before = held.copy()
        for transfer in step:
            arrived = before[transfer.source, transfer.slice_index]
            if transfer.operation == "reduce":
                # On the wire first, then the receiver's own: the order in which a ring adds.
                arrived = arrived + before[transfer.target, transfer.slice_index]
            held[transfer.target, transfer.slice_index] = arrived
    return held
