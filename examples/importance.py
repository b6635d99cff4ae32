"""Which layers are important, do they stay so, and does it pay to protect them?

python examples/importance.py                     one training: the choice, how stable it is, a picture
python examples/importance.py --compare --seeds 3  protecting the choice, other leaves, and nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

NUM_WORKERS = 8  # simulated on one device, with jax.vmap
MAX_PROTECTED = 0.05
NUM_SNAPSHOTS = 10
MAX_STEPS = 100_000


class DigitsNet(nn.Module):
    """Images (batch, 8, 8, 1) -> logits: three convolutions, and a stack of dense layers with most parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number, channels in enumerate((16, 16, 32)):
            x = nn.relu(nn.Conv(channels, (3, 3), name=f"conv{number}")(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        x = nn.Dense(64, name="flat")(x)
        for number in range(16):
            x = x + nn.Dense(64, use_bias=False, name=f"dense{number:02d}")(nn.relu(x)) / 4
        return nn.Dense(10, name="head")(x)


class TextNet(nn.Module):
    """Characters (batch, positions) -> logits of the next ones: a small transformer."""

    num_layers: int = 4
    size: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (x.shape[1], self.size))
        x = nn.Embed(128, self.size, name="embedding")(x) + positions
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        for number in range(self.num_layers):
            y = nn.RMSNorm(name=f"attention_norm{number}")(x)
            attention = nn.MultiHeadDotProductAttention(4, use_bias=False, name=f"attention{number}")
            x = x + attention(y, mask=mask)
            y = nn.Dense(3 * self.size, use_bias=False, name=f"up{number}")(nn.RMSNorm(name=f"mlp_norm{number}")(x))
            x = x + nn.Dense(self.size, use_bias=False, name=f"down{number}")(nn.gelu(y))
        return nn.Dense(128, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and its data: inputs and targets to learn from and to test with."""

    model: nn.Module
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch: int  # examples per worker and step

    def init(self, seed: Any) -> Any:
        return self.model.init(jax.random.key(seed), self.train[0][:1])["params"]

    def score(self, params: Any, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean loss and the accuracy."""
        logits: Any = self.model.apply({"params": params}, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), jnp.mean(jnp.argmax(logits, -1) == targets)


def load(name: str) -> Task:
    if name == "digits":
        images, labels = load_digits(return_X_y=True)
        images = np.asarray(images, np.float32).reshape(-1, 8, 8, 1) / 16
        split: Any = train_test_split(images, np.asarray(labels), test_size=0.2, random_state=0)
        train_x, test_x, train_y, test_y = split
        return Task(DigitsNet(), (train_x, train_y), (test_x, test_y), batch=8)
    # The reference of the Python language, which comes with Python.
    text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")
    windows = np.frombuffer(text, np.uint8)[: len(text) // 65 * 65].reshape(-1, 65).astype(np.int32)
    is_test = np.arange(len(windows)) % 16 == 0
    train, test = windows[~is_test], windows[is_test]
    return Task(TextNet(), (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:]), batch=2)


class Trainer:
    """Holds what is compiled of a task. In a loop of your own, chain track_importance, skipreduce and the optimizer."""

    def __init__(self, task: Task, num_steps: int) -> None:
        self.task, self.num_steps = task, num_steps
        self.adam = optax.adam(optax.warmup_cosine_decay_schedule(2e-4, 2e-3, max(1, num_steps // 20), num_steps, 2e-4))
        self.tracking = sr.track_importance("data", every=max(1, num_steps // 100), decay=0.9)
        self.init = jax.jit(task.init)
        self.score = jax.jit(task.score)
        local_grad = jax.grad(lambda params, batch: task.score(params, *batch)[0])
        self.local_grads = jax.jit(jax.vmap(local_grad, in_axes=(None, 0)))
        self.track = jax.jit(lambda grads, state: on_workers(self.tracking, grads, state)[1])
        # Protection is a static argument: compiled again where the choice is another one, and only there.
        self.update = jax.jit(self._update, static_argnames=("skip_ratio", "protect"))

    def _update(
        self, params: Any, states: Any, grads: Any, skip_ratio: float, protect: sr.Protection | None
    ) -> tuple[Any, Any]:
        skip_state, adam_state = states
        grads, skip_state = on_workers(sr.skipreduce("data", skip_ratio, protect=protect), grads, skip_state)
        updates, adam_state = self.adam.update(grads, adam_state, params)
        return optax.apply_updates(params, updates), (skip_state, adam_state)

    def train(
        self, seed: int, skip_ratio: float, protect: sr.Protection | None = None, tracker: Any = None
    ) -> tuple[float, float]:
        """Trains from scratch; with the same seed all but the reduction is the same. The test loss and accuracy."""
        params = self.init(seed)
        # The shifts follow from the counter: other seeds skip other slices.
        states = (sr.SkipReduceState(jnp.int32(seed * MAX_STEPS)), self.adam.init(params))
        tracked = self.tracking.init(params)
        rng = np.random.default_rng(seed)
        num_examples = len(self.task.train[0])
        shards = rng.permutation(num_examples)[: num_examples // NUM_WORKERS * NUM_WORKERS].reshape(NUM_WORKERS, -1)
        for number in range(1, self.num_steps + 1):
            columns = rng.integers(shards.shape[1], size=(NUM_WORKERS, self.task.batch))
            rows = np.take_along_axis(shards, columns, axis=1)
            grads = self.local_grads(params, tuple(x[rows] for x in self.task.train))
            params, states = self.update(params, states, grads, skip_ratio=skip_ratio, protect=protect)
            if tracker is not None:
                tracked = self.track(grads, tracked)
                if number % max(1, self.num_steps // NUM_SNAPSHOTS) == 0:
                    tracker.record(tracked, f"step {number}")
        loss, accuracy = self.score(params, *self.task.test)
        return float(loss), float(accuracy)


def on_workers(transformation: optax.GradientTransformation, grads: Any, state: Any) -> Any:
    """An update on each of the simulated workers, whose gradients are stacked. All get the same result: that one."""
    everybody = jax.vmap(lambda grads: transformation.update(grads, state), axis_name="data")(grads)
    return jax.tree.map(lambda leaf: leaf[0], everybody)


def others(chosen: sr.Protection, seed: int) -> sr.Protection:
    """In place of the choice as many parameters, or a little fewer, in leaves drawn from all others."""
    wanted = sum(leaf.num_elements for leaf in chosen.leaves if leaf.treatment == "protected")
    candidates = [leaf for leaf in chosen.leaves if leaf.treatment == "skipped"]
    rng = np.random.default_rng(seed)
    best: list[str] = []
    best_size = 0
    for _ in range(50):
        paths, size = [], 0
        for i in rng.permutation(len(candidates)):
            if size + candidates[i].num_elements <= wanted:
                paths.append(candidates[i].path)
                size += candidates[i].num_elements
        # The first of those that come close: the very closest would often be the same one.
        if size > best_size:
            best, best_size = paths, size
        if best_size > 0.9 * wanted:
            break
    treated: Any = dict.fromkeys(best, "protected")
    return dataclasses.replace(
        chosen,
        leaves=tuple(
            dataclasses.replace(leaf, treatment=treated.get(leaf.path, leaf.treatment.replace("protected", "skipped")))
            for leaf in chosen.leaves
        ),
    )


def show(trainer: Trainer, seed: int, skip_ratio: float, figure: str | None) -> float:
    """One training that protects nothing, and what it tells."""
    params = trainer.init(seed)
    tracker = sr.ImportanceTracker(params, MAX_PROTECTED)
    _, accuracy = trainer.train(seed, skip_ratio, tracker=tracker)
    chosen = tracker.snapshots[0].chosen
    print(f"Importance after a tenth of {trainer.num_steps} steps, skip ratio {skip_ratio:g}:")
    print(chosen)
    print()
    print(tracker)
    if figure:
        chosen.save_figure(figure)
        print(f"picture: {figure}")
    return accuracy


def compare(trainer: Trainer, num_seeds: int, skip_ratios: Sequence[float]) -> None:
    """What protecting is worth: for each seed, a choice is made early in its training without skipping."""
    results: dict[tuple[float, str], list[tuple[float, float]]] = {}
    shapes = jax.eval_shape(trainer.init, 0)
    speedups: dict[tuple[float, str], list[float]] = {}
    firsts = []
    for seed in range(num_seeds):
        tracker = sr.ImportanceTracker(shapes, MAX_PROTECTED)
        results.setdefault((0.0, "-"), []).append(trainer.train(seed, 0.0, tracker=tracker))
        print(f"seed {seed}, nothing skipped, so nothing to protect:\n{tracker}\n")
        chosen = tracker.snapshots[0].chosen
        firsts.append(chosen)
        for skip_ratio in skip_ratios:
            for name, protect in (("nothing", None), ("the choice", chosen), ("others", others(chosen, seed))):
                results.setdefault((skip_ratio, name), []).append(trainer.train(seed, skip_ratio, protect))
                described = sr.describe(shapes, NUM_WORKERS, skip_ratio=skip_ratio, protect=protect)
                speedups.setdefault((skip_ratio, name), []).append(described.theoretical_speedup)
        print(f"the choice: {', '.join(chosen.paths)}\nothers: {', '.join(others(chosen, seed).paths)}\n")
    print("skip ratio  protected    test loss        accuracy       loss against nothing, by seed   speed-up")
    for (skip_ratio, name), runs in results.items():
        losses, accuracies = np.asarray(runs).T
        base = np.asarray(results[skip_ratio, "nothing" if skip_ratio else "-"])[:, 0]
        by_seed = (
            " ".join(f"{difference:+.4f}" for difference in losses - base) if name in ("the choice", "others") else ""
        )
        spread = [np.std(values, ddof=1) if len(runs) > 1 else math.nan for values in (losses, accuracies)]
        print(
            f"{skip_ratio:<10g}  {name:<11}  {losses.mean():.4f} +- {spread[0]:.4f} "
            f" {accuracies.mean():.1%} +- {spread[1]:.1%}  {by_seed:<30}"
            f"  {np.mean(speedups.get((skip_ratio, name), [1.0])):.2f}x"
        )


def main(argv: Sequence[str] | None = None) -> float | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["digits", "text"], default="digits")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--skip-ratio", type=float, default=0.5, help="share of its gradient a worker leaves out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", help="file for the picture, such as importance.png")
    parser.add_argument("--compare", action="store_true", help="train with and without protection")
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison: 0, 1, ..")
    args = parser.parse_args(argv)
    trainer = Trainer(load(args.task), args.steps)
    if args.compare:
        return compare(trainer, args.seeds, (0.5, 0.75))
    accuracy = show(trainer, args.seed, args.skip_ratio, args.figure)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
