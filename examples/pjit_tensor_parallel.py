"""Data and tensor parallelism under jax.jit alone: a 4 x 2 mesh, no shard_map in user code.

python examples/pjit_tensor_parallel.py
python examples/pjit_tensor_parallel.py --axes explicit
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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

LOCAL_BATCH = 32  # images per worker and step
NUM_HIDDEN = 256

# Megatron's MLP: the first layer is cut by columns, the second by rows, so that the forward pass needs one sum over
# "model" and no more. Nothing here names "data": over that axis parameters are replicated and gradients reduced.
SPECS = {
    "up": {"kernel": P(None, "model"), "bias": P("model")},
    "down": {"kernel": P("model", None), "bias": P()},
}


def make_mesh(num_workers: int, num_shards: int, axis_type: AxisType) -> Mesh:
    """A mesh of accelerators if there are enough, else of CPU devices."""
    num_devices = num_workers * num_shards
    # One process plays all workers when it runs on CPUs. XLA reads both settings when its backend starts. Without NPROC
    # it has one thread per core, and several steps in flight can wait for each other for ever.
    os.environ.setdefault("NPROC", "16")
    with contextlib.suppress(RuntimeError):  # It runs already, as in a notebook: take the devices that it has.
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices() if len(jax.devices()) >= num_devices else jax.devices("cpu")
    if len(devices) < num_devices:
        raise SystemExit(f"--workers {num_workers}, --shards {num_shards}: there are {len(devices)} devices")
    shape, axis_types = (num_workers, num_shards), (axis_type, axis_type)
    return jax.make_mesh(shape, ("data", "model"), axis_types=axis_types, devices=devices[:num_devices])


def init(seed: int, mesh: Mesh) -> Any:
    """Parameters, sharded as SPECS says."""
    rng = np.random.default_rng(seed)

    def layer(num_in: int, num_out: int) -> dict[str, np.ndarray]:
        kernel = rng.normal(0, np.sqrt(2 / num_in), (num_in, num_out))
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(num_out, np.float32)}

    params = {"up": layer(64, NUM_HIDDEN), "down": layer(NUM_HIDDEN, 10)}
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, SPECS)


def apply(params: Any, images: jax.Array, mesh: Mesh) -> jax.Array:
    hidden = jax.nn.relu(images @ params["up"]["kernel"] + params["up"]["bias"])
    # Both operands are sharded over the dimension that is summed. With Auto axes the compiler works out what follows;
    # with Explicit axes JAX asks. P(): the result is whole on each device of "model". (The axis of the workers is not
    # seen here: vmap adds it, on "data".)
    is_explicit = AxisType.Explicit in mesh.axis_types
    out_sharding = NamedSharding(mesh, P()) if is_explicit else None
    return jnp.dot(hidden, params["down"]["kernel"], out_sharding=out_sharding) + params["down"]["bias"]


def make_train_step(mesh: Mesh, tx: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, jax.Array]]:
    def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = apply(params, images, mesh)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # jax.grad of the loss over the whole batch would come reduced already. One gradient per worker is a vmap over the
    # leading axis of the batch; spmd_axis_name says that this axis lies on "data", so each worker computes its own.
    local_value_and_grad = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0), spmd_axis_name="data")

    @jax.jit
    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        losses, grads = local_value_and_grad(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    return train_step


def train(
    num_workers: int, num_shards: int, num_steps: int, skip_ratio: float, axis_type: AxisType, seed: int
) -> tuple[Any, float]:
    """The trained parameters and their accuracy on the test images."""
    mesh = make_mesh(num_workers, num_shards, axis_type)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)

    # With mesh= and param_specs= the reduction takes gradients stacked by worker, and each shard of a parameter travels
    # by itself: nothing is gathered over "model".
    reduction = sr.skipreduce("data", skip_ratio, mesh=mesh, param_specs=SPECS, seed=seed)
    tx = optax.chain(reduction, optax.adam(3e-3))
    params = init(seed, mesh)
    opt_state = tx.init(params)
    train_step = make_train_step(mesh, tx)
    by_worker = NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = rng.integers(len(train_x), size=(num_workers, LOCAL_BATCH))
        batch = jax.device_put((train_x[rows], train_y[rows]), by_worker)
        params, opt_state, loss = train_step(params, opt_state, *batch)
        if step == 0:
            for path, leaf in jax.tree_util.tree_leaves_with_path(params):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                shard = leaf.addressable_shards[0].data.shape
                print(f"{name:12s} {leaf.shape!s:10s} {leaf.sharding.spec!s:18s} {shard} per device")
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}")
    logits = np.asarray(jax.jit(lambda params, images: apply(params, images, mesh))(params, test_x))
    return params, float(np.mean(logits.argmax(-1) == test_y))


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4, help="devices on the data axis")
    parser.add_argument("--shards", type=int, default=2, help="devices on the model axis")
    parser.add_argument("--axes", choices=["auto", "explicit"], default="auto", help="type of the mesh axes")
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of its gradient a worker leaves out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    axis_type = AxisType.Explicit if args.axes == "explicit" else AxisType.Auto
    _, accuracy = train(args.workers, args.shards, args.steps, args.skip_ratio, axis_type, args.seed)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
