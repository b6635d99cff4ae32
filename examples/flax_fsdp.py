"""FSDP: a small LLaMA whose weights, gradients and Adam moments are sharded over the workers, with skipping.

python examples/flax_fsdp.py --seeds 3

Learns the text of Python's own reference (pydoc_data, which every Python has), or of any other file (--text), byte by
byte, in four ways: nothing skipped; steps of the reduce-scatter of gradients (RS); of the all-gather of weights (AG);
both, so that the gradients left out are those of the weights that were not there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr

SIZE, NUM_HEADS, HIDDEN_SIZE, NUM_LAYERS = 64, 4, 176, 3
NUM_PREDICTED = 64  # bytes of a window that are predicted
LOCAL_BATCH = 4  # windows per worker and step
NUM_TEST = 256  # windows held out

# Layers are stacked for lax.scan, so the axis that is sharded comes second.
SPECS = {"ends": P("data"), "layers": P(None, "data")}


@dataclasses.dataclass(frozen=True)
class Method:
    """What is left out: steps of the all-gather, of the reduce-scatter, or of both."""

    name: str
    weights: bool
    grads: bool


METHODS = (
    Method("nothing skipped", False, False),
    Method("RS", False, True),
    Method("AG", True, False),
    Method("RS + AG", True, True),
)


class RMSNorm(nn.Module):
    """Its scale is stored less 1: where it was not gathered it counts as 1, and channels live on."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of queries or keys, (batch, positions, heads, channels)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Block(nn.Module):
    """One layer of a LLaMA: attention and SwiGLU, each on a normalised input and added to it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = RMSNorm(name="attention_norm")(x)
        heads = (NUM_HEADS, SIZE // NUM_HEADS)
        query, key, value = (nn.DenseGeneral(heads, use_bias=False, name=name)(h) for name in ("q", "k", "v"))
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + nn.DenseGeneral(SIZE, axis=(-2, -1), use_bias=False, name="out")(mixed)
        h = RMSNorm(name="mlp_norm")(x)
        gate = nn.silu(nn.Dense(HIDDEN_SIZE, use_bias=False, name="gate")(h))
        up = nn.Dense(HIDDEN_SIZE, use_bias=False, name="up")(h)
        return x + nn.Dense(SIZE, use_bias=False, name="down")(gate * up)


def init(seed: Any) -> dict[str, Any]:
    """Whole weights: ``ends``, what all bytes go through first and last, and ``layers``, stacked."""
    keys = jax.random.split(jax.random.key(seed), NUM_LAYERS + 2)
    layers = jax.vmap(lambda key: Block().init(key, jnp.zeros((1, NUM_PREDICTED, SIZE)))["params"])(keys[2:])
    ends = {
        "embedding": jax.random.normal(keys[0], (256, SIZE)) * 0.1,
        "head": jax.random.normal(keys[1], (SIZE, 256)) * SIZE**-0.5,
        "norm": RMSNorm().init(keys[0], jnp.zeros((1, SIZE)))["params"],
    }
    return {"ends": ends, "layers": layers}


def mean_loss(
    ends: Any, layers: Any, windows: jax.Array, weights_of: Callable[[Any, jax.Array], Any] = lambda layer, _: layer
) -> jax.Array:
    """Mean loss of a byte, in nats. `weights_of` makes of a layer, as it is kept, and its number its whole weights."""
    windows = windows.astype(jnp.int32)
    x = ends["embedding"][windows[:, :-1]]

    # Under jax.checkpoint, whole weights are gathered again in the backward pass; nobody keeps those of all layers.
    @jax.checkpoint
    def run_layer(x: jax.Array, inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        y: Any = Block().apply({"params": weights_of(*inputs)}, x)
        return y, None

    x, _ = lax.scan(run_layer, x, (layers, jnp.arange(NUM_LAYERS)))
    logits = RMSNorm().apply({"params": ends["norm"]}, x) @ ends["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def cut(weights: dict[str, Any], num_workers: int) -> dict[str, Any]:
    """Whole weights -> slices, end to end; sharded by SPECS, each worker keeps one."""
    layers = jax.vmap(lambda layer: sr.fsdp_cut(layer, num_workers))(weights["layers"])
    return {"ends": sr.fsdp_cut(weights["ends"], num_workers), "layers": layers}


def shapes() -> tuple[Any, Any]:
    """Of the ends, and of one layer."""
    whole = jax.eval_shape(lambda: init(0))
    return whole["ends"], jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), whole["layers"]))


def make_train_step(
    mesh: Mesh, method: Method, tx: optax.GradientTransformation, num_orders: int
) -> tuple[Callable[..., Any], Any]:
    """A jitted step, and how the optimizer's state is sharded: as the weights are."""
    ends_shape, layer_shape = shapes()
    state_shape = jax.eval_shape(lambda: tx.init(cut(init(0), mesh.size)))
    specs_of_leaves = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), SPECS, init_shape(mesh.size))
    state_specs = optax.tree_map_params(
        tx, lambda _, spec: spec, state_shape, specs_of_leaves, transform_non_params=lambda _: P()
    )

    # The number of steps to skip is an operand: a warm-up is what the loop outside makes of it, and compiles nothing.
    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, state_specs, P("data"), P(), P()),
        out_specs=(SPECS, state_specs, P()),
    )
    def train_step(
        shards: Any, state: Any, windows: jax.Array, count: jax.Array, num_skipped: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        def gather_layer(layer: Any, number: jax.Array) -> Any:
            return sr.fsdp_gather(
                layer,
                "data",
                shape=layer_shape,
                num_gather_skipped=num_skipped if method.weights else 0,
                num_skipped=num_skipped if method.grads else 0,
                step=count * NUM_LAYERS + number,  # of each layer, others are left out
                num_orders=num_orders,
                normalize="drop",  # Adam remembers the size of gradients from the warm-up.
                # Only where the all-gather alone is skipped does it matter: the paper's AG, gradients and all.
                align=method.grads,
            )

        def loss_fn(shards: Any) -> jax.Array:
            ends = sr.fsdp_gather(shards["ends"], "data", shape=ends_shape)  # in full
            return mean_loss(ends, shards["layers"], windows, gather_layer)

        # The loss of the local windows. Gradients come out reduced, and sharded as the weights are.
        loss, grads = jax.value_and_grad(loss_fn)(shards)
        updates, state = tx.update(grads, state, shards)
        return optax.apply_updates(shards, updates), state, lax.pmean(loss, "data")

    return train_step, state_specs


def init_shape(num_workers: int) -> Any:
    return jax.eval_shape(lambda: cut(init(0), num_workers))


def num_bytes_sent(method: Method, num_workers: int, num_skipped: int) -> int:
    """By one worker in one step: slices of 4-byte floats, gathered twice where `jax.checkpoint` gathers again."""
    slices = jax.tree.map(lambda leaf: leaf.size // num_workers, init_shape(num_workers))
    ends, layers = (sum(jax.tree.leaves(slices[part])) for part in ("ends", "layers"))
    gather = num_workers - 1 - num_skipped * method.weights
    scatter = num_workers - 1 - num_skipped * method.grads
    return 4 * (ends * 2 * (num_workers - 1) + layers * (2 * gather + scatter))


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
    return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:num_workers])


def load_windows(text: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Windows to learn and to test, uint8: the last twentieth of each document is held out."""
    if text is None:
        from pydoc_data import topics

        documents = [topics.topics[name].encode() for name in sorted(topics.topics)]
    else:
        documents = [Path(text).read_bytes()]
    train, test = [], []
    for document in documents:
        values = np.frombuffer(document, np.uint8)
        border = len(values) - len(values) // 20
        for part, kept in ((values[:border], train), (values[border:], test)):
            size = NUM_PREDICTED + 1
            kept.append(part[: len(part) // size * size].reshape(-1, size))
    train, test = np.concatenate(train), np.concatenate(test)
    if not len(train) or not len(test):
        raise SystemExit(f"--text {text}: too short to cut windows of {NUM_PREDICTED + 1} bytes")
    chosen = np.unique(np.linspace(0, len(test) - 1, NUM_TEST).round().astype(int))
    return train, test[chosen]


def shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))


def make_ends(mesh: Mesh, text: str | None) -> tuple[np.ndarray, Callable[..., Any], Callable[..., Any]]:
    """What begins and ends each training: windows to learn; seed -> shards; shards -> whole weights, test loss."""
    train_windows, test_windows = load_windows(text)
    ends_shape, layer_shape = shapes()
    # Sharded as it is made: no worker ever holds the whole.
    start = jax.jit(lambda seed: cut(init(seed), mesh.size), out_shardings=shardings(mesh, SPECS))

    @jax.jit
    def finish(shards: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        layers = jax.vmap(lambda layer: sr.fsdp_join(layer, layer_shape))(shards["layers"])
        weights = {"ends": sr.fsdp_join(shards["ends"], ends_shape), "layers": layers}
        return weights, mean_loss(weights["ends"], weights["layers"], windows)

    # The model is one: each worker has its shards, and nobody has a model of its own.
    return train_windows, start, lambda shards: finish(jax.device_get(shards), test_windows)


def train(
    mesh: Mesh,
    method: Method,
    ends: tuple[np.ndarray, Callable[..., Any], Callable[..., Any]],
    num_steps: int,
    num_skipped: int,
    warmup: int,
    seeds: Sequence[int],
    num_orders: int = 10,
) -> list[tuple[dict[str, Any], float, float]]:
    """For each seed: trained weights, their training loss (mean of the last 20 steps) and test loss."""
    train_windows, start, finish = ends
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(1, num_steps // 20), num_steps, 4e-4)
    tx = optax.adam(schedule, b2=0.99)
    train_step, state_specs = make_train_step(mesh, method, tx, num_orders)
    start_state = jax.jit(tx.init, out_shardings=shardings(mesh, state_specs))
    results = []
    for seed in seeds:
        begin = time.perf_counter()
        shards = start(np.uint32(seed))
        state = start_state(shards)
        rng, losses = np.random.default_rng(seed), []
        for step in range(num_steps):
            windows = train_windows[rng.integers(len(train_windows), size=mesh.size * LOCAL_BATCH)]
            # Another seed takes other orders of the ring.
            count, skip = seed * num_steps + step, num_skipped if step >= warmup else 0
            shards, state, loss = train_step(shards, state, windows, np.int32(count), np.int32(skip))
            losses.append(float(loss))
        weights, test_loss = finish(shards)
        results.append((weights, float(np.mean(losses[-20:])), float(test_loss)))
        print(
            f"{method.name:15}  seed {seed}  train {results[-1][1]:.3f}  test {results[-1][2]:.3f}  "
            f"({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
    return results


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8, help="devices on the data axis")
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of steps k/N left out after the warm-up")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the training in which nothing is left out")
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help=", ".join(names))
    parser.add_argument("--orders", type=int, default=10, help="orders of the ring to choose from; 1: always the same")
    parser.add_argument("--text", help="a file to learn, in place of Python's reference")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed on")
    args = parser.parse_args(argv)
    mesh = data_mesh(args.workers)
    num_skipped = min(round(args.skip_ratio * args.workers), args.workers - 1)
    warmup, seeds = round(args.warmup * args.steps), range(args.seed, args.seed + args.seeds)

    methods = [method for method in METHODS if method.name in args.methods]
    rows, in_full = {}, num_bytes_sent(METHODS[0], args.workers, 0)
    ends = make_ends(mesh, args.text)
    for method in methods:
        results = train(mesh, method, ends, args.steps, num_skipped, warmup, seeds, args.orders)
        rows[method.name] = [np.array([result[i] for result in results]) for i in (1, 2)]
    print(
        f"\n{args.workers} workers, {num_skipped} of {args.workers - 1} steps skipped after {warmup} of {args.steps} "
        f"steps of training, {args.seeds} seed(s)\n\n"
        "| skipped | sent per worker and step | less time on the wire | training loss | test loss | lowest-highest |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for method in methods:
        sent, (train_loss, test_loss) = num_bytes_sent(method, args.workers, num_skipped), rows[method.name]
        print(
            f"| {method.name} | {sent / 1e6:.2f} MB | {in_full / sent:.2f}x | {train_loss.mean():.3f} | "
            f"{test_loss.mean():.3f} | {test_loss.min():.3f}-{test_loss.max():.3f} |"
        )
    return {name: float(test_loss.mean()) for name, (_, test_loss) in rows.items()}


if __name__ == "__main__":
    main()
