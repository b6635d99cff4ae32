"""Hosts of several devices: reduced in full inside a host, with skipping between hosts.

sudo skipreduce lab --workers 2 --rate 500mbit -- python examples/hierarchical.py --devices 4
python examples/hierarchical.py    # two hosts played by one process, to see that it runs

Times the reduction of one gradient: flat, around all devices, and by fast_axes, where each device sends only its
part of the gradient between hosts. Checks means first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr

AXES = ("host", "device")


def is_lab() -> bool:
    """Whether `skipreduce lab` started this process (netlab is for Linux alone)."""
    return "SKIPREDUCE_LAB_RANK" in os.environ and sr.netlab.is_worker()


def reductions(num_hosts: int) -> dict[str, optax.GradientTransformation]:
    """What is compared."""
    num_devices = jax.device_count() // num_hosts
    half = 0.5
    return {
        "lax.pmean": optax.stateless(lambda grads, _: lax.pmean(grads, AXES)),
        f"flat ring of {jax.device_count()}, nothing skipped": sr.skipreduce(AXES, 0.0),
        f"flat ring of {jax.device_count()}, half skipped": sr.skipreduce(AXES, half),
        f"{num_hosts} hosts x {num_devices}, nothing skipped": sr.skipreduce("host", 0.0, fast_axes="device"),
        f"{num_hosts} hosts x {num_devices}, half skipped": sr.skipreduce("host", half, fast_axes="device"),
    }


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Milliseconds of each reduction, median over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="of each host")
    parser.add_argument("--hosts", type=int, default=2, help="without a lab: hosts that one process plays")
    parser.add_argument("--mebibytes", type=float, default=16, help="of float32 gradient on each device")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(arguments)
    if is_lab():
        sr.netlab.initialize(num_devices=args.devices)
        num_hosts = jax.process_count()
    else:
        os.environ.setdefault("NPROC", "16")  # XLA may hang with many collectives in flight on few cores
        num_hosts = args.hosts
        with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
            jax.config.update("jax_num_cpu_devices", num_hosts * args.devices)
    devices = np.array(jax.devices()[: num_hosts * args.devices]).reshape(num_hosts, args.devices)
    mesh = jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)

    size = int(args.mebibytes * 2**18)
    by_device = NamedSharding(mesh, P(AXES))
    # Every device's gradient is a constant of its own, 0..D-1, so that means are known.
    grads = jax.make_array_from_callback(
        (devices.size * size,),
        by_device,
        # A slice for the only dimension.
        lambda index: np.full(size, (index[0].start or 0) // size, np.float32),  # pyright: ignore[reportOptionalSubscript]
    )

    def compiled(tx: optax.GradientTransformation) -> Any:
        def step(grads: jax.Array, count: jax.Array) -> jax.Array:
            state = tx.init(grads)
            if isinstance(state, sr.SkipReduceState):
                state = sr.SkipReduceState(count)
            mean: Any = tx.update(grads, state)[0]
            return mean

        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P()))

    def count_of(number: int) -> jax.Array:
        # The same on all processes, and of all of them.
        return jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.int32(number))

    steps = {name: compiled(tx) for name, tx in reductions(num_hosts).items()}
    for name, step in steps.items():
        mean = np.asarray(jax.block_until_ready(step(grads, count_of(0))).addressable_data(0))
        expected = (devices.size - 1) / 2
        if "half" not in name and not np.allclose(mean, expected):
            raise SystemExit(f"{name}: the mean is {mean.mean()}, not {expected}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(grads, count_of(number)))
            seconds[name].append(time.perf_counter() - start)
    milliseconds = {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}
    if jax.process_index() == 0:
        shape = f"{num_hosts} hosts x {args.devices} devices"
        print(f"{args.mebibytes:g} MiB of float32 on each of {shape}, {args.rounds} rounds")
        for name, time_ms in milliseconds.items():
            speedup = float(np.median(np.array(seconds["lax.pmean"]) / np.array(seconds[name])))
            print(f"  {name:<34}{time_ms:9.1f} ms   {speedup:5.2f}x")
    return milliseconds


if __name__ == "__main__":
    main()
