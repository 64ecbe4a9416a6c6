"""Quality against work and against time, one panel column per group (figures 12 and 16 of arXiv 2405.16444)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rag_blend.evaluation.bootstrap import Interval
from rag_blend.evaluation.report import QualityReport
from rag_blend.evaluation.summary import FULL, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Axis = tuple[str, Callable[[Summary], float]]
_WORK: _Axis = ("recomputed share of reusable rows, %", lambda line: 100 * line.recompute_ratio)
_TIME: _Axis = ("median time to first token, s", lambda line: line.ttft_s)


def draw_plots(report: QualityReport, directory: str | os.PathLike[str]) -> list[Path]:
    """Draw ``quality-recompute.png`` and ``quality-ttft.png``; returns their paths.

    Each has two rows of panels: the answers' quality (F1; verbatim accuracy or agreement where there is no F1), and the
    KL to full prefill. Bars are 95 % intervals.

    Args:
        report: What to draw.
        directory: Where to.

    Raises:
        ImportError: matplotlib is not installed (``pip install -e ".[bench]"``).
        OSError: The files cannot be written.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    paths = [Path(directory) / "quality-recompute.png", Path(directory) / "quality-ttft.png"]
    for path, axis in zip(paths, (_WORK, _TIME), strict=True):
        _draw(report, axis, path)
    return paths


def _draw(report: QualityReport, axis: _Axis, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure with a canvas of its own leaves the caller's pyplot and backend alone.
    figure = Figure(figsize=(5.5 * len(report.groups), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(report.groups), squeeze=False)
    label, position = axis
    for column, (group, lines) in enumerate(report.groups.items()):
        full = lines[0]
        points = [(line, position(line)) for line in lines if line.name in {p["name"] for p in report.policies}]
        quality, quality_of = _quality(full)
        _panel(panels[0, column], points, quality_of)
        reference = quality_of(full)
        if reference is not None:
            panels[0, column].axhline(reference.estimate, color="black", linestyle="--", linewidth=1, label=FULL)
            panels[0, column].legend(fontsize="small")
        panels[0, column].set(title=group, ylabel=quality)
        _panel(panels[1, column], points, lambda line: line.kl)
        panels[1, column].set(ylabel="KL to full prefill, nats", xlabel=label)
    figure.savefig(path, dpi=150)


def _quality(full: Summary) -> tuple[str, Callable[[Summary], Interval | None]]:
    if full.verbatim is not None:
        return "verbatim accuracy", lambda line: line.verbatim
    if full.f1 is not None:
        return "F1", lambda line: line.f1
    return "agreement with full prefill", lambda line: line.agreement


def _panel(axes: Axes, points: Sequence[tuple[Summary, float]], value_of: Callable[[Summary], Interval | None]) -> None:
    for number, (line, x) in enumerate(points):
        value = value_of(line)
        if value is None:
            continue
        # A percentile interval of few cases may lie beside its estimate; a bar cannot.
        bar = [[max(0.0, value.estimate - value.low)], [max(0.0, value.high - value.estimate)]]
        axes.errorbar([x], [value.estimate], yerr=bar, fmt="o", capsize=3, color=f"C{number % 10}")
        axes.annotate(line.name, (x, value.estimate), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3)
