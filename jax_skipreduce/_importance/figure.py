"""The picture of importance: size of each layer, and how much of it is important (the paper's Fig. 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Told apart without colour vision, too.
_LOOKS: dict[str, dict[str, Any]] = {
    "protected": {"color": "#D55E00", "hatch": "//"},
    "skipped": {"color": "#0072B2", "hatch": ""},
    "small": {"color": "#999999", "hatch": ""},
}
_MEANINGS = {"protected": "protected", "skipped": "skipped", "small": "small: in full anyway"}


def save_figure(leaves: Sequence[tuple[str, int, float, str]], title: str, path: str | Path) -> None:
    """Writes the figure, as PNG or what else the name's ending says.

    Args:
      leaves: (path, number of elements, importance, treatment) of each.
      title: above the panels.
      path: of the file.

    Raises:
      ValueError: the ending is not one that matplotlib can write.
      OSError: the file cannot be written.
    """
    # Inches: what names and bars need, within what can be looked at.
    width = min(max(5.0, 0.28 * len(leaves) + 1.5), 40.0)
    # No pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(width, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    sizes, shares = figure.subplots(2, 1, sharex=True)
    positions = range(len(leaves))
    for treatment, look in _LOOKS.items():
        chosen = [i for i in positions if leaves[i][3] == treatment]
        style = {**look, "edgecolor": "white", "linewidth": 0}
        sizes.bar(chosen, [leaves[i][1] for i in chosen], **style)
        shares.bar(chosen, [100 * leaves[i][2] for i in chosen], **style)
    there = [treatment for treatment in _LOOKS if any(leaf[3] == treatment for leaf in leaves)]
    handles: list[Any] = [Patch(label=_MEANINGS[treatment], **_LOOKS[treatment]) for treatment in there]
    num_elements = sum(size for _, size, _, _ in leaves)
    if num_elements:
        average = 100 * sum(size * share for _, size, share, _ in leaves) / num_elements
        handles.append(shares.axhline(average, color="#333333", linewidth=1, linestyle=":", label="whole model"))
        sizes.set_yscale("log")
    sizes.set_ylabel("elements")
    shares.set_ylabel("important (%)")
    # A "$" in a path is no formula.
    names = [name.replace("$", r"\$") for name, _, _, _ in leaves]
    shares.set_xticks(list(positions), names, rotation=90, fontsize=7)
    for axes in (sizes, shares):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    if handles:
        # Outside of the panels, where it hides no bar.
        figure.legend(handles=handles, edgecolor="none", ncols=4, fontsize=8, loc="outside lower center")
    figure.suptitle(title.replace(": ", ":\n", 1) if len(title) > 12 * width else title, fontsize=9)
    figure.savefig(path)
