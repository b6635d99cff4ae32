"""The devices that play the workers: several accelerators, or else CPU devices of this process."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax


def find_workers(num_workers: int) -> list[Any]:
    """Up to `num_workers` devices of one kind; two or more accelerators go before CPU devices.

    Sets up as many CPU devices as needed if JAX has not started yet, unless the user has chosen a
    number (JAX_NUM_CPU_DEVICES, or XLA_FLAGS). NPROC is kept too, if it is set.

    Returns:
      At least two devices.

    Raises:
      RuntimeError: there are not two; the message says what to change.
    """
    # With fewer threads than devices XLA can hang once several steps are in flight.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * num_workers)))
    is_chosen = jax.config.values["jax_num_cpu_devices"] >= 0
    if not is_chosen and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # It raises where JAX runs already, in a program that calls this one: those devices will have to do.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_workers)
    devices = jax.devices()
    if devices[0].platform == "cpu" or len(devices) < 2:
        try:
            devices = jax.devices("cpu")
        except RuntimeError:
            raise RuntimeError(
                f"fewer than two devices ({devices[0].platform}), and JAX_PLATFORMS leaves out the CPU, whose "
                "devices could play the workers: unset it, or add ',cpu' to it"
            ) from None
    if len(devices) < 2:
        raise RuntimeError(
            "JAX has one CPU device. This program sets up one per worker, unless the number was chosen before: unset "
            "JAX_NUM_CPU_DEVICES and take --xla_force_host_platform_device_count out of XLA_FLAGS"
        )
    return devices[:num_workers]
