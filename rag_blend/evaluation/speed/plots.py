"""Draws what a speed report's view asks for."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rag_blend.evaluation.speed.report import Panel, SpeedReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX*"


def draw_plot(report: SpeedReport, path: Path) -> None:
    """Draw a report's panels, one beside the other, to a PNG file.

    Raises:
        ImportError: matplotlib is not installed (``pip install -e ".[bench]"``).
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = report.view.panels(report.rows)
    # A figure with a canvas of its own leaves the caller's pyplot and backend alone.
    figure = Figure(figsize=(4.8 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.grid(alpha=0.3)
        if panel.names:
            axes.bar([textwrap.fill(name, 14) for name in panel.names], panel.lines[0].y)
        else:
            _draw_lines(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for index, line in enumerate(panel.lines):
        # A range as bars: how far it reaches below and above.
        bars = [np.subtract(line.y, line.low), np.subtract(line.high, line.y)] if line.low else None
        marker, color = _MARKERS[index % len(_MARKERS)], f"C{index}"
        axes.errorbar(line.x, line.y, bars, capsize=3, label=line.label, marker=marker, color=color, markersize=5)
    axes.set(xscale="log")
    axes.set_ylim(bottom=0)
    ticks = sorted({x for line in panel.lines for x in line.x})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.legend(fontsize="small")
