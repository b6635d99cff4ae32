"""A training that goes on with the workers that are left when one dies: checkpoints and restarts.

python examples/elastic.py --processes 3 --checkpoints /tmp/elastic

A launcher starts N processes that talk over Gloo, on this machine. They save a checkpoint every few steps. When a
worker dies or hangs (kill one!), the others notice within a bounded time, and N-1 new ones go on from the last
checkpoint. The same command with other --processes and more --steps goes on with fewer or more.

Needs, beside `pip install '.[demo]'`: `pip install orbax-checkpoint`. On several machines a scheduler (Slurm,
Kubernetes) plays the launcher, and --checkpoints is a folder that all of them see.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

GLOBAL_BATCH = 96  # images per step, whatever the number of workers: so the learning rate need not change with it

# How long a failure may go unnoticed. See docs/failures.md for which limit is for what.
HEARTBEAT_S = 10  # a worker is dead, stopped or cut off
STEP_S = 60  # a worker lives but hangs; no step takes so long, nor a checkpoint
START_S = 300  # from the start of a process to its first step: Python, JAX, the other workers, compilation
EXIT_S = 10  # a worker that ends waits for the others


def init(seed: int) -> Any:
    rng, sizes = np.random.default_rng(seed), [(64, 128), (128, 128), (128, 10)]
    kernels = [rng.normal(0, np.sqrt(2 / size[0]), size).astype(np.float32) for size in sizes]
    return [{"kernel": kernel, "bias": np.zeros(kernel.shape[1], np.float32)} for kernel in kernels]


def apply(params: Any, images: Any) -> jax.Array:
    *hidden, head = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    return images @ head["kernel"] + head["bias"]


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()


def work(args: argparse.Namespace) -> None:
    """What each process does."""
    me = f"worker {args.rank} of {args.processes}"
    with sr.time_limit(START_S, f"{me}: the start"):
        start(args)
        train_step, state, batch_of, accuracy = build(args)
        manager = ocp.CheckpointManager(args.checkpoints, options=ocp.CheckpointManagerOptions(max_to_keep=2))
        first = manager.latest_step() or 0
        if first:
            template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(template))
        if args.rank == 0:
            print(f"from step {first}, workers: {args.processes}", flush=True)
        if first < args.steps:
            state, loss = jax.block_until_ready(train_step(state, *batch_of(first)))  # compiles

    for step in range(first + 1, args.steps):
        # The block holds all that may wait: for data, for the other workers, for the disk.
        with sr.time_limit(STEP_S, f"{me}, step {step}"):
            if step % args.save_every == 0:
                # A folder that gets its name when it is complete: a worker that dies meanwhile leaves the one before.
                manager.save(step, args=ocp.args.StandardSave(state))
            state, loss = train_step(state, *batch_of(step))
            jax.block_until_ready(state)
            if args.rank == 0 and step % 50 == 0:
                print(f"step {step:4d}  loss {loss:.3f}", flush=True)

    with sr.time_limit(STEP_S, f"{me}: the end"):
        if first < args.steps:
            manager.save(args.steps, args=ocp.args.StandardSave(state), force=True)
        manager.close()
        if args.rank == 0:
            print(f"done after step {args.steps}, test accuracy {accuracy(state):.1%}", flush=True)
        jax.distributed.shutdown()


def start(args: argparse.Namespace) -> None:
    """JAX on this process and the others."""
    os.environ.setdefault("NPROC", "16")
    # Gloo would wait half an hour for a worker that lives but does not come. Sooner than STEP_S, as an exception of
    # Python ends a process more gently.
    flags = f"--xla_cpu_collective_timeout_seconds={STEP_S - 10} {os.environ.get('XLA_FLAGS', '')}"
    os.environ["XLA_FLAGS"] = flags
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator,
        num_processes=args.processes,
        process_id=args.rank,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=EXIT_S,
    )


def build(args: argparse.Namespace) -> tuple[Any, ...]:
    """The training step, its first state, the data of a step, and the accuracy of a state."""
    mesh = jax.make_mesh((args.processes,), ("data",), axis_types=(AxisType.Auto,))
    by_worker, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)
    # Each process keeps a part of the training images to itself: another one when N changes.
    train_x, train_y = train_x[args.rank :: args.processes], train_y[args.rank :: args.processes]

    def batch_of(step: int) -> tuple[jax.Array, jax.Array]:
        # A function of the step, so that a run that was interrupted gets the batches that it would have got.
        rng = np.random.default_rng([args.seed, step, args.rank])
        rows = rng.integers(len(train_x), size=GLOBAL_BATCH // args.processes)
        return jax.make_array_from_process_local_data(by_worker, (train_x[rows], train_y[rows]))

    tx = optax.chain(sr.skipreduce("data", args.skip_ratio, seed=args.seed), optax.adam(3e-3))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = sr.local_value_and_grad(loss_fn, "data")(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    def accuracy(state: Any) -> float:
        logits = np.asarray(apply(jax.tree.map(np.asarray, state[0]), test_x))
        return float(np.mean(logits.argmax(-1) == test_y))

    params = init(args.seed)
    # skipreduce's own part of the state is a step counter: like the rest it knows nothing of the number of workers.
    return train_step, jax.device_put((params, tx.init(params)), replicated), batch_of, accuracy


def run_workers(argv: Sequence[str], num_processes: int) -> int:
    """Starts the workers; returns 0 when all are done, or the first code of one that failed, when all have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    # The last --processes counts.
    command = [sys.executable, __file__, *argv, f"--processes={num_processes}", "--coordinator", coordinator]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            workers.append(subprocess.Popen([*command, "--rank", str(rank)]))
            print(f"worker {rank} is process {workers[-1].pid}", flush=True)
        while True:
            codes = [worker.poll() for worker in workers]
            if failed := [(rank, code) for rank, code in enumerate(codes) if code]:
                rank, code = failed[0]
                how = f"code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
                print(f"worker {rank} ended with {how}", file=sys.stderr, flush=True)
                # They would end by themselves, and say why. Here nobody has to wait for that.
                return code if code > 0 else 128 - code
            if None not in codes:
                return 0
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def launch(argv: Sequence[str], args: argparse.Namespace) -> int:
    """Starts workers until all are done, each time one fewer: so this ends, too. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    code = 0
    for num_processes in range(args.processes, args.min_processes - 1, -1):
        if (code := run_workers(argv, num_processes)) == 0:
            return 0
        # A mistake in the program shows before the first checkpoint, mostly, and would come again.
        if latest_step(args.checkpoints) is None:
            print("no checkpoint yet: not restarted", file=sys.stderr)
            return code
    print(f"fewer than --min-processes {args.min_processes} workers are left", file=sys.stderr)
    return code


def latest_step(folder: Path) -> int | None:
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []
    return max(steps, default=None)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=lambda text: Path(text).absolute(), required=True, help="folder")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--min-processes", type=int, default=1, help="give up with fewer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of its gradient a worker leaves out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)  # for workers: host:port of rank 0
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, least in (("processes", args.min_processes), ("min_processes", 1), ("save_every", 1), ("steps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")
    if args.processes > GLOBAL_BATCH:
        parser.error(f"--processes {args.processes}: expected at most {GLOBAL_BATCH}, the images of a step")
    if args.rank is None:
        return launch(argv, args)
    work(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
