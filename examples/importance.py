"""Which layers are important, do they stay so, and does it pay to protect them?

python examples/importance.py                     one training: the choice, how stable it is, a picture
python examples/importance.py --compare --seeds 3  protecting the choice, other leaves, and nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_skipreduce as sr

NUM_WORKERS = 8  # simulated on one device, with jax.vmap
MAX_PROTECTED_RATIO = 0.05
NUM_SNAPSHOTS = 10
MAX_STEPS = 100_000

Snapshots: TypeAlias = dict[str, sr.Protection]  # what would be chosen, by the time of the training


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
    """Holds what is compiled of a task."""

    def __init__(self, task: Task, num_steps: int) -> None:
        self.task, self.num_steps = task, num_steps
        self.adam = optax.adam(optax.warmup_cosine_decay_schedule(2e-4, 2e-3, max(1, num_steps // 20), num_steps, 2e-4))
        self.init = jax.jit(task.init)
        self.score = jax.jit(task.score)
        local_grad = jax.grad(lambda params, batch: task.score(params, *batch)[0])
        self.local_grads = jax.jit(jax.vmap(local_grad, in_axes=(None, 0)))
        self.average = jax.jit(averaged)
        # Protection is a static argument: compiled again where the choice is another one, and only there.
        self.update = jax.jit(self._update, static_argnames=("skip_ratio", "protect"))

    def _update(
        self, params: Any, states: Any, grads: Any, skip_ratio: float, protect: sr.Protection | None
    ) -> tuple[Any, Any]:
        skip_state, adam_state = states
        reduction = sr.skipreduce("data", skip_ratio, protect=protect)
        grads, skip_state = on_workers(lambda own: reduction.update(own, skip_state), grads)
        updates, adam_state = self.adam.update(grads, adam_state, params)
        return optax.apply_updates(params, updates), (skip_state, adam_state)

    def train(
        self, seed: int, skip_ratio: float, protect: sr.Protection | None = None, snapshots: Snapshots | None = None
    ) -> tuple[float, float]:
        """Trains from scratch; runs with the same seed differ in the reduction alone. The test loss and accuracy."""
        params = self.init(seed)
        # The shifts follow from the counter: other seeds skip other slices.
        states = (sr.SkipReduceState(jnp.int32(seed * MAX_STEPS)), self.adam.init(params))
        average, num_averaged = jax.tree.map(lambda _: jnp.float32(0), params), 0
        rng = np.random.default_rng(seed)
        num_examples = len(self.task.train[0])
        shards = rng.permutation(num_examples)[: num_examples // NUM_WORKERS * NUM_WORKERS].reshape(NUM_WORKERS, -1)
        for number in range(1, self.num_steps + 1):
            columns = rng.integers(shards.shape[1], size=(NUM_WORKERS, self.task.batch))
            rows = np.take_along_axis(shards, columns, axis=1)
            grads = self.local_grads(params, tuple(x[rows] for x in self.task.train))
            params, states = self.update(params, states, grads, skip_ratio=skip_ratio, protect=protect)
            if snapshots is not None:
                if (number - 1) % max(1, self.num_steps // 100) == 0:
                    average = self.average(average, grads, num_averaged)
                    num_averaged += 1
                if number % max(1, self.num_steps // NUM_SNAPSHOTS) == 0:
                    snapshots[f"step {number}"] = sr.choose_protected(average, params, MAX_PROTECTED_RATIO)
        loss, accuracy = self.score(params, *self.task.test)
        return float(loss), float(accuracy)


def on_workers(function: Callable[[Any], Any], grads: Any) -> Any:
    """What the function gives on each of the simulated workers, whose gradients are stacked: the same on all."""
    everybody = jax.vmap(function, axis_name="data")(grads)
    return jax.tree.map(lambda leaf: leaf[0], everybody)


def averaged(average: Any, grads: Any, num_averaged: jax.Array) -> Any:
    """The running average of importance with one more sample: a plain mean of the first ten, exponential then."""
    sample = on_workers(lambda own: sr.importance(own, axis_name="data"), grads)
    weight = jnp.maximum(1 / (num_averaged + 1), 0.1)
    return jax.tree.map(lambda mean, share: mean + weight * (share - mean), average, sample)


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


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation of two sequences of the same length; NaN where it is not defined."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        """From 0; equal values share the mean of their ranks."""
        _, group, sizes = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
        return (np.cumsum(sizes) - (sizes + 1) / 2)[group]

    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def correlation(one: sr.Protection, other: sr.Protection) -> float:
    """The rank correlation of importance at two times, over the leaves that there is a choice about."""
    shares = [
        [leaf.importance for leaf in chosen.leaves if leaf.treatment in ("protected", "skipped")]
        for chosen in (one, other)
    ]
    return spearman(*shares)


def overlap(before: sr.Protection, now: sr.Protection) -> float:
    """The share of what is chosen now, in elements, that was chosen before, too."""
    sizes = {leaf.path: leaf.num_elements for leaf in now.leaves if leaf.treatment == "protected"}
    kept = sum(size for path, size in sizes.items() if path in before.paths)
    return kept / sum(sizes.values()) if sizes else float(not before.paths)


def held(before: sr.Protection, now: sr.Protection) -> float:
    """The share of what is important now, in elements, that lies in the leaves chosen before."""
    important = {leaf.path: leaf.importance * leaf.num_elements for leaf in now.leaves}
    return sum(important[path] for path in before.paths) / (sum(important.values()) or 1)


def print_stability(snapshots: Snapshots) -> None:
    """Prints whether a choice made early stays the right one."""
    labels, choices = list(snapshots), list(snapshots.values())
    first, previous = choices[0], choices[0]
    rows = []
    for chosen in choices:
        compared = (correlation(previous, chosen), correlation(first, chosen), overlap(first, chosen))
        # The first snapshot is compared with nothing.
        rho_previous, rho_first, kept = compared if rows else (math.nan,) * 3
        rows.append((rho_previous, rho_first, chosen.protected_ratio, kept, held(chosen, chosen), held(first, chosen)))
        previous = chosen
    columns = [[value for value in column if not math.isnan(value)] for column in zip(*rows, strict=True)]
    rows.append(tuple(float(np.mean(column)) if column else math.nan for column in columns))
    header = ("rho previous", "rho first", "protected", "in first", "holds", "first holds")
    formats = (".2f", ".2f", ".1%", ".0%", ".1%", ".1%")
    width = max(map(len, ("snapshot", *labels)))
    lines = ["  ".join(["snapshot".ljust(width), *header])]
    for label, row in zip([*labels, "mean"], rows, strict=True):
        cells = ["-" if math.isnan(value) else f"{value:{spec}}" for value, spec in zip(row, formats, strict=True)]
        aligned = [cell.rjust(len(name)) for cell, name in zip(cells, header, strict=True)]
        lines.append("  ".join([label.ljust(width), *aligned]))
    rule = "-" * len(lines[0])
    num_leaves = sum(leaf.treatment in ("protected", "skipped") for leaf in first.leaves)
    print("\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]]))
    print(
        f"rho: rank correlation (Spearman) of the importance of {num_leaves} leaves with that of the previous and the "
        "first snapshot.\n"
        "protected: share of the parameters that is chosen; in first: how much of that was in the first choice, too.\n"
        "holds: share of the important elements in the leaves chosen now; first holds: in those chosen first."
    )


# Colours that are told apart without colour vision, too.
LOOKS: dict[str, dict[str, Any]] = {
    "protected": {"color": "#D55E00", "hatch": "//"},
    "skipped": {"color": "#0072B2", "hatch": ""},
    "small": {"color": "#999999", "hatch": ""},
}


def save_figure(chosen: sr.Protection, path: str) -> None:
    """Writes a picture as the paper's Fig. 9: the size of each layer, and how much of it is important."""
    leaves = [leaf for leaf in chosen.leaves if leaf.treatment in LOOKS]
    figure = Figure(figsize=(max(5.0, 0.28 * len(leaves) + 1.5), 6), dpi=120, layout="constrained")
    sizes, shares = figure.subplots(2, 1, sharex=True)
    for position, leaf in enumerate(leaves):
        style = {**LOOKS[leaf.treatment], "edgecolor": "white", "linewidth": 0}
        sizes.bar(position, leaf.num_elements, **style)
        shares.bar(position, 100 * leaf.importance, **style)
    sizes.set(yscale="log", ylabel="elements")
    shares.set_ylabel("important (%)")
    shares.set_xticks(range(len(leaves)), [leaf.path for leaf in leaves], rotation=90, fontsize=7)
    handles = [Patch(label=treatment, **look) for treatment, look in LOOKS.items()]
    # Outside of the panels, where the legend hides no bar.
    figure.legend(handles=handles, edgecolor="none", ncols=3, fontsize=8, loc="outside lower center")
    figure.suptitle(str(chosen).splitlines()[-1].replace(": ", ":\n", 1), fontsize=9)
    figure.savefig(path)


def show(trainer: Trainer, seed: int, skip_ratio: float, figure: str | None) -> float:
    """One training that protects nothing, and what it tells."""
    snapshots: Snapshots = {}
    _, accuracy = trainer.train(seed, skip_ratio, snapshots=snapshots)
    chosen = next(iter(snapshots.values()))
    print(f"Importance after a tenth of {trainer.num_steps} steps, skip ratio {skip_ratio:g}:")
    print(chosen)
    print()
    print_stability(snapshots)
    if figure:
        save_figure(chosen, figure)
        print(f"picture: {figure}")
    return accuracy


def compare(trainer: Trainer, num_seeds: int, skip_ratios: Sequence[float]) -> None:
    """What protecting is worth. For each seed, the choice is made early in a training that skips nothing."""
    results: dict[tuple[float, str], list[tuple[float, float]]] = {}
    shapes = jax.eval_shape(trainer.init, 0)
    speedups: dict[tuple[float, str], list[float]] = {}
    for seed in range(num_seeds):
        snapshots: Snapshots = {}
        results.setdefault((0.0, "-"), []).append(trainer.train(seed, 0.0, snapshots=snapshots))
        print(f"seed {seed}, nothing skipped, so nothing to protect:")
        print_stability(snapshots)
        chosen = next(iter(snapshots.values()))
        for skip_ratio in skip_ratios:
            for name, protect in (("nothing", None), ("the choice", chosen), ("others", others(chosen, seed))):
                results.setdefault((skip_ratio, name), []).append(trainer.train(seed, skip_ratio, protect))
                described = sr.describe(shapes, NUM_WORKERS, skip_ratio=skip_ratio, protect=protect)
                speedups.setdefault((skip_ratio, name), []).append(described.theoretical_speedup)
        print(f"\nthe choice: {', '.join(chosen.paths)}\nothers: {', '.join(others(chosen, seed).paths)}\n")
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
