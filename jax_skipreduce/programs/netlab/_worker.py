"""The worker's side: what the launcher tells it in the environment, and how that sets JAX up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from jax_skipreduce.programs.netlab._plan import Plan
from jax_skipreduce.programs.netlab._rendezvous import meet

COORDINATOR = "SKIPREDUCE_LAB_COORDINATOR"
NUM_WORKERS = "SKIPREDUCE_LAB_NUM_WORKERS"
RANK = "SKIPREDUCE_LAB_RANK"

# glibc gives large blocks back to the system. Every step then faults its pages in anew: with gradients of 64 MiB that
# is a tenth of a step. Accelerator allocators keep memory. Other C libraries do not read this variable.
_KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}" for name in (f"mmap_threshold={2**32 - 1}", f"trim_threshold={2**33}", "arena_max=1")
)

_FORCED_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")

_is_initialized = False


def environment(plan: Plan, rank: int, inherited: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of worker `rank`: what the launcher has, `extra`, and what the lab sets."""
    # No proxy can be reached from a lab, and JAX warns of them.
    env = {name: value for name, value in inherited.items() if not name.lower().endswith("_proxy")}
    env.setdefault("JAX_PLATFORMS", "cpu")
    # Stock XLA may hang when many executions with collectives are in flight on few cores.
    env.setdefault("NPROC", "16")
    env.setdefault("GLIBC_TUNABLES", _KEEP_MEMORY)
    # One device per process, even if several were forced for the launcher.
    env["JAX_NUM_CPU_DEVICES"] = "1"
    if "XLA_FLAGS" in env:
        env["XLA_FLAGS"] = " ".join(_FORCED_DEVICES.sub("", env["XLA_FLAGS"]).split())
    env["PYTHONUNBUFFERED"] = "1"
    lab = {COORDINATOR: plan.coordinator, NUM_WORKERS: str(len(plan.workers)), RANK: str(rank)}
    return {**env, **extra, **lab}


def is_worker() -> bool:
    """Whether this process was started by `skipreduce lab`.

    >>> is_worker()  # Not here.
    False
    """
    return all(name in os.environ for name in (COORDINATOR, NUM_WORKERS, RANK))


def initialize(timeout_s: int = 120, num_devices: int = 1) -> None:
    """Makes this process one of the N of a lab: `jax.distributed`, CPU devices, collectives over Gloo.

    Call it before anything makes JAX look for devices. A second call does nothing.

    Args:
      timeout_s: seconds to wait for all workers to come.
      num_devices: CPU devices of this process. Several make the process a host with several accelerators, which share
        its link and reach each other without it.

    Raises:
      RuntimeError: `skipreduce lab` did not start the process, JAX runs already, or a worker did not come.
      ValueError: the environment variables of the lab, `timeout_s` or `num_devices` make no sense.

    >>> if is_worker():  # Only in a lab, so not in this example.
    ...     initialize()
    """
    global _is_initialized
    if _is_initialized:
        return
    if timeout_s < 1:
        raise ValueError(f"timeout_s={timeout_s}: expected at least one second")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: expected at least one")
    missing = [name for name in (COORDINATOR, NUM_WORKERS, RANK) if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"netlab.initialize() is for processes of a lab, and {', '.join(missing)} are not set: start the program "
            "with `skipreduce lab --workers N --rate 500mbit -- python program.py`, or ask netlab.is_worker() first"
        )
    coordinator, num_workers, rank = read_environment(os.environ)

    import jax

    # Not left to the environment, whose settings may be meant for the program that started the lab.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, _, port = coordinator.rpartition(":")
    try:
        # Raises where JAX runs already.
        jax.config.update("jax_num_cpu_devices", num_devices)
        # The next port, as JAX will listen at the coordinator's.
        meet((host, int(port) + 1), num_workers, rank, timeout_s)
        jax.distributed.initialize(
            coordinator,
            num_processes=num_workers,
            process_id=rank,
            initialization_timeout=timeout_s,
            # By default it listens for IPv6, which is off in a lab.
            coordinator_bind_address=coordinator,
        )
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"netlab.initialize(), worker {rank} of {num_workers}: {error}") from error
    _is_initialized = True


def read_environment(env: Mapping[str, str]) -> tuple[str, int, int]:
    """Coordinator, number of workers and rank.

    Raises:
      ValueError: one of them is not what the launcher writes.
    """
    coordinator, num_workers, rank = env[COORDINATOR], env[NUM_WORKERS], env[RANK]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 - 1:
        raise ValueError(f"{COORDINATOR}={coordinator!r}: expected host:port")
    if not num_workers.isdecimal() or int(num_workers) < 1:
        raise ValueError(f"{NUM_WORKERS}={num_workers!r}: expected a number from 1 on")
    if not rank.isdecimal() or int(rank) >= int(num_workers):
        raise ValueError(f"{RANK}={rank!r}: expected a number from 0 to {int(num_workers) - 1}")
    return coordinator, int(num_workers), int(rank)
