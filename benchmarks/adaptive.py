"""Does it pay to choose k by a measured signal? Against fixed ratios and plain ramps, at the bytes that each sends.

Eight simulated workers, scikit-learn's digits, a small network. The signal costs one scalar on the wire: from the
squared norms of local gradients and of their mean over c = N - k contributors follow the variance s2 of a local
gradient and the squared norm g2 of the true one (as for the gradient noise scale of McCandlish et al., 2018). The noise
of a mean of c gradients, relative to the gradient, is s2 / (c g2): the controller takes the fewest contributors with
which that stays below a threshold, within bounds. All workers have the same numbers, so they decide alike.

    python benchmarks/adaptive.py --seeds 5 --json benchmarks/adaptive.json
"""

import argparse
import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jax_skipreduce as sr
from jax_skipreduce.programs.common.data import DataName, Partition, load, partition

N = 8
MOST_SKIPPED = 6


def fixed(ratio: float) -> Any:
    return lambda progress, signal: jnp.float32(ratio)  # noqa: ARG005


def ramp(first: float, last: float) -> Any:
    return lambda progress, signal: first + (last - first) * progress  # noqa: ARG005


def adaptive(threshold: float) -> Any:
    def ratio(progress: Any, signal: Any) -> Any:
        noise = signal["variance"] / jnp.maximum(signal["norm"], 1e-20)
        contributors = jnp.clip(jnp.ceil(noise / threshold), N - MOST_SKIPPED, N)
        return jnp.where(progress < 0.025, 0.0, (N - contributors) / N)  # until averages mean something

    return ratio


POLICIES = {
    "full": fixed(0.0),
    "fixed 0.25": fixed(0.25),
    "fixed 0.5": fixed(0.5),
    "fixed 0.75": fixed(0.75),
    "ramp 0 to 0.75": ramp(0.0, 0.75),
    "ramp 0.75 to 0": ramp(0.75, 0.0),
    **{f"adaptive {threshold:g}": adaptive(threshold) for threshold in (1.0, 2.0, 4.0, 8.0)},
}


def init(key: Any) -> Any:
    sizes = [(64, 64), (64, 64), (64, 10)]
    return [
        {"w": jax.random.normal(k, size) * jnp.sqrt(2 / size[0]), "b": jnp.zeros(size[1])}
        for k, size in zip(jax.random.split(key, 3), sizes, strict=True)
    ]


def loss_fn(params: Any, images: Any, labels: Any) -> Any:
    *hidden, head = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    logits = images @ head["w"] + head["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_norm(tree: Any) -> Any:
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnames=("policy", "optimizer", "num_steps"))
def train(policy: str, optimizer: str, num_steps: int, key: Any, images: Any, labels: Any, batches: Any) -> Any:
    """Parameters, and k of each step. `images`: (N, shard, 64); `batches`: (num_steps, N, batch)."""
    tx = optax.adam(2e-3) if optimizer == "adam" else optax.sgd(5e-2, momentum=0.9)
    params = init(key)

    def step(carry: Any, inputs: Any) -> Any:
        params, state, signal = carry
        count, batch = inputs
        ratio = POLICIES[policy](count / num_steps, signal)
        k = jnp.clip(jnp.round(ratio * N), 0, N - 1).astype(jnp.int32)
        shift = jax.random.randint(jax.random.fold_in(key, count), (), 0, N)

        def worker(images: Any, labels: Any, rows: Any) -> Any:
            grads = jax.grad(loss_fn)(params, images[rows], labels[rows])
            options = {"num_skipped": k, "shift": shift, "normalize": "drop", "backend": "xla"}
            mean = jax.tree.map(lambda leaf: sr.all_reduce(leaf, "data", **options), grads)
            return mean, lax.pmean(squared_norm(grads), "data")

        mean, local = jax.tree.map(lambda leaf: leaf[0], jax.vmap(worker, axis_name="data")(images, labels, batch))
        contributors = (N - k).astype(jnp.float32)
        variance = (local - squared_norm(mean)) * contributors / jnp.maximum(contributors - 1, 1)
        new = {"variance": jnp.maximum(variance, 0), "norm": jnp.maximum(local - variance, 0)}
        signal = jax.tree.map(lambda old, now: jnp.where(count == 0, now, 0.9 * old + 0.1 * now), signal, new)
        updates, state = tx.update(mean, state, params)
        return (optax.apply_updates(params, updates), state, signal), k

    start = (params, tx.init(params), {"variance": jnp.float32(0), "norm": jnp.float32(0)})
    (params, _, _), ks = lax.scan(step, start, (jnp.arange(num_steps), batches))
    return params, ks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="images per worker")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    common.use_cpu_devices(1)
    data = load(DataName.DIGITS)
    train_images, test_images = (x.reshape(len(x), -1) for x in (data.train_images, data.test_images))
    figures: dict[str, Any] = {}
    for optimizer in ("adam", "sgd"):
        for how in Partition:
            print(f"\n{optimizer}, {how.value}, {args.steps} steps of {N} x {args.batch} images, {args.seeds} seeds")
            print(f"{'policy':<16}{'bytes':>8}{'test loss':>20}{'accuracy':>10}{'k at 10, 50, 90 %':>20}")
            for policy in POLICIES:
                losses, accuracies, traces = [], [], []
                for seed in range(args.seeds):
                    shards = partition(data.train_labels, N, how, seed)
                    rng = np.random.default_rng((seed, 1))
                    batches = rng.integers(shards.shape[1], size=(args.steps, N, args.batch))
                    params, ks = train(
                        policy,
                        optimizer,
                        args.steps,
                        jax.random.key(seed),
                        jnp.asarray(train_images[shards]),
                        jnp.asarray(data.train_labels[shards]),
                        jnp.asarray(batches),
                    )
                    losses.append(float(loss_fn(params, test_images, data.test_labels)))
                    accuracies.append(accuracy(params, test_images, data.test_labels))
                    traces.append(np.asarray(ks))
                sent = float(np.mean([(2 * (N - 1) - k) / (2 * (N - 1)) for k in traces]))
                at = [float(np.mean([k[int(part * args.steps)] for k in traces])) for part in (0.1, 0.5, 0.9)]
                row = {"bytes": sent, "losses": losses, "accuracies": accuracies, "k": at}
                figures[f"{optimizer} {how.value} {policy}"] = row
                spread = f"{np.mean(losses):.4f} +- {np.std(losses, ddof=1) / np.sqrt(len(losses)):.4f}"
                shown = ", ".join(f"{k:.1f}" for k in at)
                print(f"{policy:<16}{sent:8.3f}{spread:>20}{np.mean(accuracies):10.3f}{shown:>20}")
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    common.write_json(args.json, {"machine": common.machine(), "arguments": arguments, "figures": figures})


def accuracy(params: Any, images: Any, labels: Any) -> float:
    *hidden, head = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return float((jnp.argmax(images @ head["w"] + head["b"], -1) == labels).mean())


if __name__ == "__main__":
    main()
