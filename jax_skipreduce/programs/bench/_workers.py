"""The workers: devices of one process or of many, and what processes tell each other."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_skipreduce.programs.common.devices import find_workers

_NUM_SIMULATED = 8


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Makes this process one of several: as a lab says if it was started by one, or as the arguments say.

    Args:
      coordinator: host and port where process 0 listens, the same for all. ``"auto"``: as the cluster says (SLURM,
        Open MPI, TPU pods). None: one process, unless in a lab.
      num_processes: how many there are; None: as the cluster says.
      process_id: which one this is, from 0; None: as the cluster says.

    Raises:
      RuntimeError, ValueError: the processes did not find together.
    """
    # Not at the top: a lab is a program of its own, which a benchmark can do without.
    from jax_skipreduce import netlab

    if coordinator is None:
        if netlab.is_worker():
            netlab.initialize()
        return
    # With fewer threads than devices XLA can hang once several steps are in flight.
    os.environ.setdefault("NPROC", "16")
    address = None if coordinator == "auto" else coordinator
    jax.distributed.initialize(address, num_processes=num_processes, process_id=process_id)


def find(num_workers: int | None) -> list[Any]:
    """The devices that play the workers: all of all processes; in one process as many as asked for.

    In one process these are its accelerators if it has two or more, else CPU devices, which are set up as
    needed (8 if no number is asked for).

    Raises:
      RuntimeError: there are fewer than two, or not as many as asked for; the message says what to change.
    """
    if jax.distributed.is_initialized():
        devices = jax.devices()
        if num_workers is not None and num_workers != len(devices):
            raise RuntimeError(
                f"{num_workers} workers, but {jax.process_count()} process(es) have {len(devices)} device(s), and each "
                "device of theirs is a worker: leave the number out"
            )
    else:
        devices = find_workers(num_workers or _NUM_SIMULATED)
        if num_workers is None and devices[0].platform != "cpu":
            devices = jax.devices()
        if num_workers is not None and num_workers > len(devices):
            raise RuntimeError(f"{num_workers} workers, but JAX has {len(devices)} {devices[0].platform} devices")
    if len(devices) < 2:
        raise RuntimeError("there is one device in all processes together: there is nothing to reduce over")
    return devices


def gather(values: np.ndarray) -> np.ndarray:
    """The `values` of all processes, of the same shape and a dtype of 8 bytes, stacked by process."""
    # As 32-bit words, because JAX makes float64 and int64 narrower unless it is told otherwise.
    words = multihost_utils.process_allgather(np.ascontiguousarray(values).view(np.uint32))
    return np.asarray(words).reshape(jax.process_count(), -1).view(values.dtype).reshape(-1, *values.shape)
