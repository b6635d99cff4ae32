"""Runs a schedule in NumPy, on the slices of all workers at once. The oracle of the tests."""

from __future__ import annotations

import numpy as np
import numpy.typing

from jax_skipreduce._topologies.schedule import Schedule


def run(
    schedule: Schedule,
    slices: np.ndarray,
    accumulator: np.typing.DTypeLike | None = None,
    wire_dtype: np.typing.DTypeLike | None = None,
) -> np.ndarray:
    """The slices that every worker holds after the schedule.

    Args:
      schedule: the steps to run.
      slices: shape (num_workers, num_slices, ...), what each worker holds before.
      accumulator: dtype to add in; sums are rounded to the dtype of `slices` when they travel on.
        None: the dtype of `slices`.
      wire_dtype: dtype that values are rounded to when they travel. A worker that passes a reduced slice
        on rounds its own as well, so that all workers hold the same. None: values are not rounded.

    Returns:
      An array of the same shape and dtype.

    Raises:
      ValueError: `slices` does not have a row per worker and a column per slice.
    """
    expected = (schedule.num_workers, schedule.num_slices)
    if slices.shape[:2] != expected:
        raise ValueError(f"slices.shape={slices.shape}: expected it to begin with {expected}")
    held = slices.astype(slices.dtype if accumulator is None else accumulator)
    for step in schedule.steps:
        before = held.copy()
        for transfer in step:
            # What is on the wire has the dtype of the slices, or a narrower one.
            arrived = before[transfer.source, transfer.slice_index].astype(slices.dtype)
            if wire_dtype is not None:
                arrived = arrived.astype(wire_dtype).astype(slices.dtype)
            arrived = arrived.astype(held.dtype)
            if transfer.operation == "copy":
                held[transfer.source, transfer.slice_index] = arrived
            if transfer.operation == "reduce":
                # On the wire first, then the receiver's own: the order in which a ring adds.
                arrived = np.add(arrived, before[transfer.target, transfer.slice_index])
            held[transfer.target, transfer.slice_index] = arrived
    return held.astype(slices.dtype)
