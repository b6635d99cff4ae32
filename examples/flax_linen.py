"""Flax linen with TrainState: a warm-up of the skip ratio, a protected layer, a checkpoint.

python examples/flax_linen.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

LOCAL_BATCH = 32  # images per worker and step


class Classifier(nn.Module):
    """Handwritten digits, 8 x 8 pixels, to 10 logits."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(128, name="stem")(images))
        x = nn.relu(nn.Dense(128, name="hidden")(x))
        return nn.Dense(10, name="head")(x)


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
    # Auto axes let train_step take arrays as they are. With the default, Explicit, place them first: the state
    # with jax.device_put(.., NamedSharding(mesh, P())), the batch with P("data").
    return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:num_workers])


def make_train_step(mesh: Mesh) -> Callable[..., tuple[TrainState, jax.Array]]:
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = sr.local_value_and_grad(loss_fn, "data")(state.params)
        return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")

    return train_step


def save_and_restore(directory: str, state: TrainState) -> TrainState:
    """Writes the state and reads it back. All that skipreduce adds to it is a step counter."""
    with ocp.StandardCheckpointer() as checkpointer:
        path = Path(directory).resolve() / f"step_{int(state.step)}"
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))


def train(num_workers: int, num_steps: int, skip_ratio: float, seed: int) -> tuple[TrainState, float]:
    """The last state and its accuracy on the test images."""
    mesh = data_mesh(num_workers)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)

    # Nothing is skipped while gradients are large, then half. The ratio is a function of the step counter, so the
    # training step is not compiled again when it changes. (Not optax.piecewise_constant_schedule: that multiplies,
    # and from 0 there is no way up.)
    warmup_steps = num_steps // 4
    schedule = optax.join_schedules(
        [optax.constant_schedule(0.0), optax.constant_schedule(skip_ratio)], boundaries=[warmup_steps]
    )
    # The first layer is reduced in full all the time: it is small, and it sees the data.
    # "drop", because with a ratio that changes "skip" would change the size of gradients, which Adam remembers.
    reduction = sr.SkipReduce("data", schedule, normalize="drop", protect=sr.by_path(r"^stem/"), seed=seed)
    tx = optax.chain(reduction.transform(), optax.adam(3e-3))

    model = Classifier()
    params = model.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]
    print(f"after {warmup_steps} steps of warm-up:")
    print(reduction.describe(params, num_workers, count=warmup_steps))

    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    train_step = make_train_step(mesh)
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        if step == num_steps // 2:
            with tempfile.TemporaryDirectory() as directory:
                state = save_and_restore(directory, state)
            print(f"step {step:4d}  restored from a checkpoint")
        rows = rng.integers(len(train_x), size=num_workers * LOCAL_BATCH)
        state, loss = train_step(state, train_x[rows], train_y[rows])
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}")
    logits = np.asarray(state.apply_fn({"params": state.params}, test_x))
    return state, float(np.mean(logits.argmax(-1) == test_y))


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8, help="devices on the data axis")
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share left out after the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    _, accuracy = train(args.workers, args.steps, args.skip_ratio, args.seed)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
