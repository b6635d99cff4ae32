"""Equinox, data-parallel: each worker trains on its share of the batch, gradients are skip-reduced.

pip install equinox; python examples/equinox_mlp.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

LOCAL_BATCH = 32  # images per worker and step


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


def make_model(seed: int) -> eqx.nn.MLP:
    """Handwritten digits, 8 x 8 pixels, to 10 logits."""
    return eqx.nn.MLP(64, 10, width_size=128, depth=2, key=jax.random.key(seed))


def loss_fn(model: eqx.nn.MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_train_step(mesh: Mesh, tx: optax.GradientTransformation, model: eqx.nn.MLP) -> Callable[..., Any]:
    # A model has leaves that are no arrays, its activation functions, and shard_map takes arrays alone: the model is
    # split, and joined again inside.
    static = eqx.partition(model, eqx.is_array)[1]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        # eqx.filter_value_and_grad would hand out gradients that are summed over the workers already. Here, too,
        # activation functions pass, and have None for a gradient.
        model = eqx.combine(params, static)
        loss, grads = sr.local_value_and_grad(loss_fn, "data")(model, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    return train_step


def train(num_workers: int, num_steps: int, skip_ratio: float, seed: int) -> tuple[Any, float]:
    """The trained model and its accuracy on the test images."""
    mesh = data_mesh(num_workers)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)

    model = make_model(seed)
    params, static = eqx.partition(model, eqx.is_array)
    method = sr.SkipReduce("data", skip_ratio, seed=seed)
    tx = optax.chain(method.transform(), optax.adam(3e-3))
    opt_state = tx.init(params)
    print(method.describe(params, num_workers))
    train_step = make_train_step(mesh, tx, model)
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = rng.integers(len(train_x), size=num_workers * LOCAL_BATCH)
        params, opt_state, loss = train_step(params, opt_state, train_x[rows], train_y[rows])
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}")
    logits = np.asarray(jax.vmap(eqx.combine(params, static))(jnp.asarray(test_x)))
    return params, float(np.mean(logits.argmax(-1) == test_y))


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
