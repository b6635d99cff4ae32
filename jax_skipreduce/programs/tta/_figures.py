"""The pictures: accuracy against time, speed-up to the target, and the parts of a step (Figs. 11, 12, 13)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_skipreduce.programs.common.figures import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, make_figure
from jax_skipreduce.programs.tta._methods import BASELINE
from jax_skipreduce.programs.tta._records import Run
from jax_skipreduce.programs.tta._report import NOT_REACHED
from jax_skipreduce.programs.tta._results import Results

# The line style tells methods apart as well.
_COLORS = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY, "#8C6D1F")
_STYLES = ("-", "--", "-.", ":")

_NUM_TIMES = 400


def save_figures(results: Results, directory: Path) -> list[Path]:
    """Writes the pictures as PNG; without a break-down there is none of it.

    Returns:
      The paths.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawings = {"accuracy": _draw_accuracy, "speedup": _draw_speedup}
    if results.parts:
        drawings["breakdown"] = _draw_breakdown
    paths = []
    for name, draw in drawings.items():
        figure = make_figure(9, 5)
        axes = figure.subplots()
        axes.set_title(results.measurement.title, fontsize="medium")
        draw(results, axes)
        axes.spines[["top", "right"]].set_visible(False)
        paths.append(directory / f"{results.measurement.settings.name}-{name}.png")
        figure.savefig(paths[-1])
    return paths


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _draw_accuracy(results: Results, axes: Any) -> None:
    late = [results.target * 100]
    for number, summary in enumerate(results.summaries):
        runs = [run for run in results.measurement.runs if run.method == summary.method]
        for run in runs:
            accuracies = [e.accuracy * 100 for e in run.evaluations]
            axes.plot([e.seconds for e in run.evaluations], accuracies, color=_color(number), alpha=0.3, linewidth=0.7)
            late += accuracies[len(accuracies) // 4 :]
        style = _STYLES[number // 2 % len(_STYLES)]
        axes.plot(*_mean_curve(runs), style, color=_color(number), linewidth=1.8, label=summary.method)
    axes.axhline(results.target * 100, color="gray", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        f"target {results.target:.1%}",
        (1, results.target * 100),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize="small",
        color="gray",
    )
    # The first evaluations would squeeze what there is to compare.
    span = max(max(late) - min(late), 4)
    axes.set(
        xlabel="seconds of training", ylabel="test accuracy (%)", ylim=(min(late) - 0.2 * span, max(late) + 0.1 * span)
    )
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")


def _mean_curve(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy over the seeds at each time, as far as all of them go."""
    first = max(run.evaluations[0].seconds for run in runs)
    last = min(run.evaluations[-1].seconds for run in runs)
    # Where one run ended before another one's first evaluation there is no common time.
    times = np.linspace(first, max(first, last), _NUM_TIMES)
    curves = [
        np.interp(times, [e.seconds for e in run.evaluations], [e.accuracy * 100 for e in run.evaluations])
        for run in runs
    ]
    return times, np.mean(curves, axis=0)


def _draw_speedup(results: Results, axes: Any) -> None:
    summaries = [summary for summary in results.summaries if summary.method != BASELINE]
    for position, summary in enumerate(summaries):
        known = [outcome.speedup for outcome in summary.outcomes if outcome.speedup is not None]
        number = [other.method for other in results.summaries].index(summary.method)
        if summary.speedup is not None:
            axes.bar(position, summary.speedup, width=0.6, color=_color(number), alpha=0.4)
            axes.text(position, 0.03, f"{summary.speedup:.2f}x", ha="center", fontsize="small")
        axes.plot([position] * len(known), known, "o", color=_color(number), markersize=4)
        num_missing = len(summary.outcomes) - len(known)
        if num_missing:
            text = f"{NOT_REACHED}\n({num_missing} of {len(summary.outcomes)})"
            axes.text(position, 0.2, text, ha="center", fontsize="small")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(summaries)), [summary.method for summary in summaries], rotation=20, ha="right")
    axes.set(ylabel=f"speed-up over {BASELINE} to {results.target:.1%}\n(median, and each seed)")
    axes.set_ylim(bottom=0)


def _draw_breakdown(results: Results, axes: Any) -> None:
    names = list(results.parts)
    bottom = np.zeros(len(names))
    parts = (
        ("compute", "compute", BLUE, ""),
        ("overhead", "overhead of the method", ORANGE, "//"),
        ("communication", "exposed communication", RED, ".."),
    )
    for field, label, color, hatch in parts:
        # Noise may make a small part negative; the table has it as it is.
        heights = np.array([max(0.0, getattr(results.parts[name], field)) for name in names]) * 1e3
        axes.bar(names, heights, 0.6, bottom=bottom, color=color, hatch=hatch, edgecolor="white", label=label)
        bottom += heights
    for position, name in enumerate(names):
        share = f"{results.parts[name].share_of_communication:.0%}"
        axes.text(position, bottom[position], share, ha="center", va="bottom", fontsize="small")
    axes.tick_params(axis="x", rotation=20)
    axes.set(ylabel="a step (ms); above: share of communication", ylim=(0, max(bottom) * 1.2))
    axes.legend(loc="upper right", fontsize="small")
