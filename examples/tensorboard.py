"""Logs what skipreduce does, beside the loss, for TensorBoard.

pip install '.[demo]' tensorboardX
python examples/tensorboard.py --logdir runs && tensorboard --logdir runs

Any logger takes the same dict: wandb.log(metrics, step), a line of JSON, print.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from tensorboardX import SummaryWriter

import jax_skipreduce as sr

NUM_WORKERS = 8
LOCAL_BATCH = 32


def init(seed: int) -> list[dict[str, Any]]:
    rng, sizes = np.random.default_rng(seed), [(64, 128), (128, 10)]
    kernels = [rng.normal(0, np.sqrt(2 / size[0]), size).astype(np.float32) for size in sizes]
    return [{"kernel": kernel, "bias": np.zeros(kernel.shape[1], np.float32)} for kernel in kernels]


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    *hidden, head = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    logits = images @ head["kernel"] + head["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, logs, and returns what was logged last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", default="runs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    os.environ.setdefault("NPROC", "16")  # XLA may hang with many collectives in flight on few cores
    with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
        jax.config.update("jax_num_cpu_devices", NUM_WORKERS)
    mesh = jax.make_mesh((NUM_WORKERS,), ("data",), axis_types=(AxisType.Auto,))

    # Nothing skipped at first, then a ramp to half. "drop" keeps the size of gradients as it is.
    ramp = optax.linear_schedule(0.0, 0.5, args.steps // 2, transition_begin=args.steps // 10)
    reduction = sr.SkipReduce("data", ramp, normalize="drop", seed=args.seed)
    tx = optax.chain(reduction.transform(), optax.adam(3e-3))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = sr.local_value_and_grad(loss_fn, "data")(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images, jnp.float32) / 16, jnp.asarray(labels)
    rng = np.random.default_rng(args.seed)
    params: Any = init(args.seed)
    opt_state, logged = tx.init(params), {}
    with SummaryWriter(args.logdir) as writer:
        for step in range(args.steps):
            rows = rng.choice(len(images), NUM_WORKERS * LOCAL_BATCH, replace=False)
            if step % args.log_every == 0:
                logged = reduction.metrics(opt_state, params, NUM_WORKERS)
            params, opt_state, loss = train_step(params, opt_state, images[rows], labels[rows])
            if step % args.log_every == 0:
                logged |= {"loss": float(loss)}
                for name, value in logged.items():
                    writer.add_scalar(name, value, step)
    print(f"after {args.steps} steps: " + ", ".join(f"{name} {value:.4g}" for name, value in logged.items()))
    print(f"tensorboard --logdir {args.logdir}")
    return logged


if __name__ == "__main__":
    main()
