"""Pictures: how a matplotlib figure is made, and its colours.

Imported by the modules that draw: it needs matplotlib.
"""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Told apart without colour vision (Okabe and Ito).
BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
)


def make_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. It can be saved as PNG without a display."""
    # No pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
