"""The picture: speed-up over psum against the skip ratio, measured and in theory (the paper's Fig. 8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jax_skipreduce._topologies.ring import RING
from jax_skipreduce.programs.bench._rows import Row
from jax_skipreduce.programs.common.figures import BLUE, GREEN, RED, make_figure

_MAX_COLUMNS = 3

# Told apart without colour vision, too. The rest of the look says static or random.
_WIRE_COLORS = {"float32": BLUE, "bfloat16": RED}
_MARKERS = {"ring static": "s", "ring random": "o", "native static": "D", "native random": "^"}


def save_figure(rows: Sequence[Row], num_workers: int, title: str, path: Path) -> None:
    """Writes the figure as PNG.

    Raises:
      OSError: the file cannot be written.
    """
    draw(rows, num_workers, title).savefig(path, format="png")


def draw(rows: Sequence[Row], num_workers: int, title: str) -> Figure:
    """One panel per message size."""
    sizes = list(dict.fromkeys(row.size_bytes for row in rows))
    num_columns = min(len(sizes), _MAX_COLUMNS)
    num_lines = math.ceil(len(sizes) / num_columns)
    figure = make_figure(1.2 + 4.4 * num_columns, 1.6 + 3.6 * num_lines)
    panels = figure.subplots(num_lines, num_columns, squeeze=False, sharex=True, sharey=True)
    for panel, size_bytes in zip(panels.flat, sizes, strict=False):
        _draw_size(panel, [row for row in rows if row.size_bytes == size_bytes], num_workers)
        panel.set_title(_size_name(size_bytes), fontsize=11)
    for panel in panels.flat[len(sizes) :]:
        panel.remove()
    for panel in panels[:, 0]:
        panel.set_ylabel("speed-up over lax.psum")
    for column in range(num_columns):
        bottom = (len(sizes) - 1 - column) // num_columns
        panels[bottom, column].set_xlabel("skip ratio k/N")
        panels[bottom, column].tick_params(labelbottom=True)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * num_columns), edgecolor="none"
    )
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_size(panel: Any, rows: Sequence[Row], num_workers: int) -> None:
    """One size: theory as a line per wire dtype, what was measured as points with the 10th to the 90th percentile."""
    panel.axhline(1, color="#777777", linewidth=1, label="psum")
    for row in rows:
        if row.algorithm == "psum-bf16":
            panel.axhline(row.speedup, color="#777777", linewidth=1, linestyle=":", label="psum in bfloat16")
        elif row.is_method:
            panel.axhline(row.speedup, color=GREEN, linewidth=1, linestyle="--", label=row.algorithm)
    ring = [row for row in rows if row.mode is not None]
    ratios = np.arange(num_workers) / num_workers
    series = list(dict.fromkeys((row.wire_dtype, row.algorithm, row.mode) for row in ring))
    for wire_dtype in dict.fromkeys(wire_dtype for wire_dtype, _, _ in series):
        first = next(row for row in ring if row.wire_dtype == wire_dtype)
        # The bytes of all k are those of one of them, times the ratio of their slices.
        slices = np.array([RING.slices_sent(num_workers, k) for k in range(num_workers)])
        theory = first.theoretical_speedup * RING.slices_sent(num_workers, first.num_skipped) / slices
        panel.plot(ratios, theory, color=_WIRE_COLORS[wire_dtype], linewidth=1.2, label=f"theory, {wire_dtype} wire")
    for number, (wire_dtype, algorithm, mode) in enumerate(series):
        points = [row for row in ring if (row.wire_dtype, row.algorithm, row.mode) == (wire_dtype, algorithm, mode)]
        # Side by side, so that bars do not hide each other.
        offset = (number - (len(series) - 1) / 2) * 0.12 / num_workers
        speedups = np.array([row.speedup for row in points])
        low, high = (np.array([getattr(row, name) for row in points]) for name in ("speedup_p10", "speedup_p90"))
        panel.errorbar(
            np.array([row.skip_ratio for row in points]) + offset,
            speedups,
            # The median of few rounds may be their tenth percentile but for rounding.
            yerr=np.maximum([speedups - low, high - speedups], 0),
            fmt=_MARKERS[f"{algorithm} {mode}"],
            markersize=5,
            markerfacecolor="white" if mode == "static" else _WIRE_COLORS[wire_dtype],
            color=_WIRE_COLORS[wire_dtype],
            elinewidth=1,
            capsize=2,
            label=f"{algorithm}, {mode}, {wire_dtype} wire",
        )
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _size_name(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"
