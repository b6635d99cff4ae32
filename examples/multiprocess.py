"""Several processes on one machine, one worker each, that talk over Gloo. Starts itself once per worker.

python examples/multiprocess.py --processes 2
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

LOCAL_BATCH = 32  # images per worker and step


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


def are_same_everywhere(tree: Any) -> bool:
    """Whether all processes hold the same bits. Only digests are sent."""
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    return bool((digests == digests[0]).all())


def work(args: argparse.Namespace) -> None:
    """What each process does."""
    # A worker that waits for one that died is inside of XLA, where Python cannot interrupt it; an alarm ends it anyway.
    signal.alarm(args.time_limit)
    # Before the backend starts: Gloo is for CPUs; one device per process; threads enough for several steps in flight.
    os.environ.setdefault("NPROC", "16")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.rank)
    mesh = jax.make_mesh((args.processes,), ("data",), axis_types=(AxisType.Auto,))
    by_worker, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)
    # Each process keeps a part of the training images to itself.
    train_x, train_y = train_x[args.rank :: args.processes], train_y[args.rank :: args.processes]

    tx = optax.chain(sr.skipreduce("data", args.skip_ratio, seed=args.seed), optax.adam(3e-3))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = sr.local_value_and_grad(loss_fn, "data")(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    params = jax.device_put(init(args.seed), replicated)  # The same seed everywhere,
    opt_state = jax.device_put(tx.init(params), replicated)
    rng = np.random.default_rng([args.seed, args.rank])  # but batches of its own.
    for step in range(args.steps):
        rows = rng.integers(len(train_x), size=LOCAL_BATCH)
        batch = jax.make_array_from_process_local_data(by_worker, (train_x[rows], train_y[rows]))
        params, opt_state, loss = train_step(params, opt_state, *batch)
        if args.rank == 0 and (step % 50 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)

    # What skipreduce returns is the same on all workers, bit for bit, so the replicas never drift.
    if not are_same_everywhere(params):
        sys.exit("parameters differ between processes")
    if args.rank == 0:
        print(f"parameters are bitwise the same on all {args.processes} processes")
        logits = np.asarray(apply(jax.tree.map(np.asarray, params), test_x))
        print(f"test accuracy {np.mean(logits.argmax(-1) == test_y):.1%}", flush=True)


def launch(argv: Sequence[str], num_processes: int, time_limit: int) -> int:
    """Starts the workers and waits for them. When one fails, ends the others. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, *argv, "--coordinator", coordinator]
    deadline = time.monotonic() + time_limit
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            workers.append(subprocess.Popen([*command, "--rank", str(rank)]))
            print(f"worker {rank} is process {workers[-1].pid}", flush=True)
        while True:
            codes = [worker.poll() for worker in workers]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                rank, code = failed[0]
                print(f"worker {rank} ended with code {code}; ending the others", file=sys.stderr)
                return code if code > 0 else 128 - code  # a signal, the way a shell reports it
            if None not in codes:
                return 0
            if time.monotonic() > deadline:
                print(f"--time-limit {time_limit}: not done after so many seconds", file=sys.stderr)
                return 124  # as from timeout(1)
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of its gradient a worker leaves out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=int, default=120, help="seconds until everything is ended")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)  # for workers: host:port of rank 0
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: expected at least 1")
    if args.rank is None:
        return launch(argv, args.processes, args.time_limit)
    work(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
