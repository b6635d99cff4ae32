"""Starts the workers of a measurement, in a lab or as devices of this process, and collects what they wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jax_skipreduce.programs.tta import _records
from jax_skipreduce.programs.tta._records import Measurement
from jax_skipreduce.programs.tta._settings import Settings


class StoppedError(RuntimeError):
    """Workers could not be had, or ended before all runs were made."""


def measure(settings: Settings, say: Callable[[str], None]) -> Measurement:
    """Makes all runs that are missing.

    Args:
      settings: with a rate, of a lab that is made for it; without one the workers are devices of this process.
      say: shows a line, where the workers are in this process. Those in a lab write to standard output.

    Raises:
      StoppedError: there are no workers, or those of the lab failed.
      RuntimeError: replicas differ.
    """
    if settings.rate is None:
        _run_here(settings, say)
    else:
        _run_in_lab(settings)
    return _records.read(settings.path)


def measure_as_worker(settings: Settings, say: Callable[[str], None]) -> Measurement | None:
    """The same in a process that a lab has started already, together with the other workers.

    Returns:
      What was measured; None in all processes but that of worker 0.
    """
    from jax_skipreduce import netlab

    netlab.initialize()

    import jax

    from jax_skipreduce.programs.tta._campaign import run_all
    from jax_skipreduce.programs.tta._cluster import Cluster

    cluster = Cluster(jax.devices())
    run_all(settings, cluster, say)
    return _records.read(settings.path) if cluster.is_first else None


def _run_in_lab(settings: Settings) -> None:
    from jax_skipreduce import netlab

    assert settings.rate is not None
    # Paths of options are relative to the folder that this program was started in, and so are the workers.
    command = [sys.executable, "-m", "jax_skipreduce.programs.tta", settings.to_json()]
    try:
        code = netlab.run(command, num_workers=settings.num_workers, rate=settings.rate)
    except netlab.LabError as error:
        raise StoppedError(f"no lab for {settings.name}: {error}") from error
    if code:
        raise StoppedError(
            f"the workers of {settings.name} ended with exit status {code}; what they wrote above says why. The runs "
            f"that were complete are in {settings.path}: the same command with --resume makes the others"
        )


def _run_here(settings: Settings, say: Callable[[str], None]) -> None:
    from jax_skipreduce.programs.common.devices import find_workers
    from jax_skipreduce.programs.tta._campaign import run_all
    from jax_skipreduce.programs.tta._cluster import Cluster

    try:
        devices = find_workers(settings.num_workers)
    except RuntimeError as error:
        raise StoppedError(str(error)) from error
    if len(devices) < settings.num_workers:
        raise StoppedError(f"JAX has {len(devices)} devices, too few for {settings.num_workers} workers")
    run_all(settings, Cluster(devices), say)
