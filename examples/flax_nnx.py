"""Flax NNX, data-parallel: each worker trains on its share of the batch, gradients are skip-reduced.

python examples/flax_nnx.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

LOCAL_BATCH = 32  # images per worker and step


class Classifier(nnx.Module):
    """Handwritten digits, 8 x 8 pixels, to 10 logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden1 = nnx.Linear(64, 128, rngs=rngs)
        self.hidden2 = nnx.Linear(128, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden1(images))
        return self.head(nnx.relu(self.hidden2(x)))


def data_mesh(num_workers: int) -> Mesh:
    """A mesh of `num_workers` accelerators if there are so many, else of CPU devices."""
    # One process plays all workers when it runs on CPUs. XLA reads both settings when its backend starts. Without NPROC
    # it has one thread per core, and several steps in flight can wait for each other for ever.
    os.environ.setdefault("NPROC", "16")
    with contextlib.suppress(RuntimeError):  # It runs already, as in a notebook: take the devices that it has.
        jax.config.update("jax_num_cpu_devices", num_workers)
    devices = jax.devices() if len(jax.devices()) >= num_workers else jax.devices("cpu")
    if len(devices) < num_workers:
        raise SystemExit(f"--workers {num_workers}: there are {len(devices)} devices")
    # Auto axes let train_step take arrays as they are. With the default, Explicit, place them first: parameters
    # with jax.device_put(.., NamedSharding(mesh, P())), the batch with P("data").
    return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:num_workers])


def make_train_step(mesh: Mesh) -> Callable[..., jax.Array]:
    # nnx.shard_map is jax.shard_map that carries changes of the model and the optimizer out again. Both are the same on
    # all workers, P(); what each worker has of its own is its rows of the batch, P("data").
    @nnx.jit
    @nnx.shard_map(mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def train_step(model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
        graphdef, params = nnx.split(model, nnx.Param)

        def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
            logits = nnx.merge(graphdef, params)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        # In place of nnx.value_and_grad, which would hand out gradients that are summed over the workers already.
        loss, grads = sr.local_value_and_grad(loss_fn, "data")(params, images, labels)
        optimizer.update(model, grads)  # Reduces them: skipreduce is the first link of the chain.
        return jax.lax.pmean(loss, "data")

    return train_step


def train(num_workers: int, num_steps: int, skip_ratio: float, seed: int) -> tuple[Classifier, float]:
    """The trained model and its accuracy on the test images."""
    mesh = data_mesh(num_workers)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)

    model = Classifier(nnx.Rngs(seed))
    reduction = sr.SkipReduce("data", skip_ratio, seed=seed)
    optimizer = nnx.Optimizer(model, optax.chain(reduction.transform(), optax.adam(3e-3)), wrt=nnx.Param)
    # nnx.Optimizer hands optax plain arrays. Described as such, the paths are those that protect= gets to see.
    print(reduction.describe(nnx.to_pure_dict(nnx.state(model, nnx.Param)), num_workers))
    train_step = make_train_step(mesh)
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = rng.integers(len(train_x), size=num_workers * LOCAL_BATCH)
        loss = train_step(model, optimizer, train_x[rows], train_y[rows])
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}")
    logits = np.asarray(model(jnp.asarray(test_x)))
    return model, float(np.mean(logits.argmax(-1) == test_y))


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8, help="devices on the data axis")
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of its gradient a worker leaves out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    _, accuracy = train(args.workers, args.steps, args.skip_ratio, args.seed)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
