"""One process of test_failures.py and test_netlab_failures.py: trains until something goes wrong.

``failing_worker.py COORDINATOR NUM_PROCESSES RANK [options]``; see `main` for the options.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._checks.deadline import time_limit

FAULT_AT = 5  # the step in which a fault of the program's own happens


def next_batch(args: argparse.Namespace, step: int) -> np.ndarray:
    if step == FAULT_AT and args.hangs == args.rank:
        time.sleep(10_000)
    if step == FAULT_AT and args.raises == args.rank:
        raise OSError("no more data")
    poison = np.nan if args.nan == args.rank and step == FAULT_AT else 1.0
    return np.random.default_rng([step, args.rank]).normal(size=(4, 16)).astype(np.float32) * np.float32(poison)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("num_processes", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("--heartbeat", type=int, default=100)
    parser.add_argument("--shutdown", type=int, default=300)
    parser.add_argument("--time-limit", type=float, default=1000)
    parser.add_argument("--hangs", type=int, help="rank of a worker that hangs in its data loader")
    parser.add_argument("--raises", type=int, help="rank of a worker whose data loader raises")
    parser.add_argument("--nan", type=int, help="rank of a worker with one batch that is NaN")
    parser.add_argument("--if-finite", action="store_true", help="leave out steps that are not finite")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--ready", type=Path, help="a file to make when training runs")
    parser.add_argument("--out", type=Path, help="a file for the parameters")
    args = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator,
        args.num_processes,
        args.rank,
        heartbeat_timeout_seconds=args.heartbeat,
        shutdown_timeout_seconds=args.shutdown,
        coordinator_bind_address=args.coordinator,
    )
    mesh = jax.make_mesh((args.num_processes,), ("data",), axis_types=(AxisType.Auto,))
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 3) if args.if_finite else optax.adam(1e-2)
    tx = optax.chain(sr.skipreduce("data", 0.5, min_size=1), optimizer)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = sr.local_value_and_grad(lambda w, x: jnp.mean((x @ w - 1) ** 2), "data")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    params = np.ones((16, 16), np.float32)
    state = jax.device_put((params, tx.init(params)), NamedSharding(mesh, P()))
    by_worker = NamedSharding(mesh, P("data"))
    for step in range(args.steps):
        with time_limit(1000 if step == 0 else args.time_limit, f"worker {args.rank}, step {step}"):
            batch = jax.make_array_from_process_local_data(by_worker, next_batch(args, step))
            state, loss = jax.block_until_ready(train_step(state, batch))
            if not args.if_finite and not np.isfinite(loss):
                # The mean is the same everywhere, so all workers come here in the same step.
                sys.exit(f"worker {args.rank}: the loss is {loss:g} in step {step}")
        if step == 3 and args.ready:
            args.ready.touch()
        time.sleep(0.01)
    if args.out:
        skipped = state[1][1].total_notfinite if args.if_finite else 0
        np.savez(args.out, params=np.asarray(state[0]), skipped=np.asarray(skipped))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
