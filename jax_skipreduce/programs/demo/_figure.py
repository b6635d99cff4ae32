"""The picture: training loss and test accuracy of both methods, step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jax_skipreduce.programs.common.figures import BLUE, RED, make_figure
from jax_skipreduce.programs.demo._report import Comparison
from jax_skipreduce.programs.demo._settings import Settings

# Told apart without colour vision, too.
_COLORS = (BLUE, RED)
_STYLES = ("-", "--")

_SMOOTHED_SHARE = 0.04


def save_figure(comparison: Comparison, path: Path) -> None:
    """Writes the figure, as PNG or what else the name's ending says.

    With several seeds, curves are means over them.

    Raises:
      ValueError: the ending is not one that matplotlib can write.
      OSError: the file cannot be written.
    """
    figure = make_figure(11, 4.6)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    late_accuracies: list[float] = []
    for method, color, style in zip((comparison.full, comparison.skipping), _COLORS, _STYLES, strict=True):
        losses = np.mean([run.losses for run in method.runs], axis=0)
        steps = np.arange(1, len(losses) + 1)
        loss_axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
        loss_axes.plot(steps, _smooth(losses), style, color=color, linewidth=1.8, label=method.name)
        accuracies = np.mean([run.accuracies for run in method.runs], axis=0)
        label = f"{method.name}: {accuracies[-1] * 100:.1f} % at the end"
        evaluated = method.runs[0].evaluated_steps
        accuracy_axes.plot(evaluated, accuracies * 100, style, color=color, marker="o", markersize=3.5, label=label)
        late_accuracies += [share * 100 for share in accuracies[len(accuracies) // 4 :]]
    loss_axes.set(xlabel="training step", ylabel="training loss (log scale)", yscale="log")
    # The first steps would squeeze what there is to compare: they may leave the panel at the bottom, where the
    # legend is.
    lowest, highest = min(late_accuracies), max(late_accuracies)
    span = max(highest - lowest, 4)
    limits = (max(0, lowest - 0.4 * span), highest + 0.15 * span)
    accuracy_axes.set(xlabel="training step", ylabel="test accuracy (%)", ylim=limits)
    accuracy_axes.set_xlim(loss_axes.get_xlim())
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    loss_axes.legend(edgecolor="none", loc="lower left")
    accuracy_axes.legend(edgecolor="none", loc="lower right")
    figure.suptitle(_title(comparison), fontsize=11)
    figure.savefig(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over the neighbours of each value, over fewer at both ends."""
    half = round(len(values) * _SMOOTHED_SHARE / 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    positions = np.arange(len(values))
    first = np.maximum(positions - half, 0)
    # At the start as few on the right as on the left: there the curve falls steeply and would bend.
    last = np.minimum(positions + np.minimum(half, positions), len(values) - 1)
    return (sums[last + 1] - sums[first]) / (last + 1 - first)


def _title(comparison: Comparison) -> str:
    settings, description = comparison.settings, comparison.description
    if settings.mode == "dropout":
        what = f"elements left out with probability {description.num_skipped}/{settings.num_workers}"
    else:
        what = f"{description.num_skipped} of {settings.num_workers - 1} reduce-scatter steps skipped"
    return (
        f"{settings.data.value} on {settings.num_workers} workers, {settings.partition.value} shards: full reduction "
        f"against skipreduce\nmode {settings.mode.value}, {what}, normalize {settings.normalize.value}; "
        f"{_training(settings)}"
    )


def _training(settings: Settings) -> str:
    seeds = f"seed {settings.seeds[0]}" if len(settings.seeds) == 1 else f"mean of {len(settings.seeds)} seeds"
    return (
        f"{settings.optimizer.value}, learning rate {settings.learning_rate:g}, "
        f"batch {settings.batch_size} per worker, {seeds}"
    )
