"""Drawing of the deviation figures: each gets the numbers it shows, and writes them as JSON next to the PNG."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_blend.errors import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = {"unprimed": "-", "primed": "--"}


@dataclass(frozen=True, slots=True)
class AttentionLine:
    """Figure 6: one selector on one kind of cache. All lists have one entry per ratio, means over prompts.

    Attributes:
        cache: ``"unprimed"`` or ``"primed"``.
        selector: Chose the tokens.
        ratios: Share of the reusable tokens that was asked to be recomputed.
        computed: Share of the reusable rows that was computed, the selector's own passes included.
        question: Attention deviation of the question's tokens; 1 is reuse of unprimed caches without recomputation.
        question_error: Its standard error over prompts.
        last: The same of the last token.
        last_error: Its standard error over prompts.
    """

    cache: str
    selector: str
    ratios: list[float]
    computed: list[float]
    question: list[float]
    question_error: list[float]
    last: list[float]
    last_error: list[float]


@dataclass(frozen=True, slots=True)
class DeviationLine:
    """Figure 7: the KV deviation of tokens in one layer, over all prompts.

    Attributes:
        cache: ``"unprimed"`` or ``"primed"``.
        layer: The layer, from 0.
        tokens: How many tokens: those of all chunks but the first of each prompt.
        percentiles: Their deviation at 0, 1, ... 100 %.
        first_chunk: Mean deviation of the tokens of the first chunks, which an unprimed cache holds exactly.
    """

    cache: str
    layer: int
    tokens: int
    percentiles: list[float]
    first_chunk: float


@dataclass(frozen=True, slots=True)
class RankLine:
    """Figure 8: how alike the order of the tokens by KV deviation is in a layer and the next one.

    Attributes:
        cache: ``"unprimed"`` or ``"primed"``.
        layers: The first of each two layers, from 1: in layer 0 nothing deviates.
        mean: Spearman's rank correlation, mean over prompts.
        lowest: Of all prompts.
        highest: Of all prompts.
    """

    cache: str
    layers: list[int]
    mean: list[float]
    lowest: list[float]
    highest: list[float]


def require_matplotlib() -> None:
    """Fail before anything is measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message holds the pip line to run.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"figures need matplotlib; {install_hint('bench')}") from error


def plot_attention(lines: Sequence[AttentionLine], title: str, path: Path) -> list[Path]:
    """Figure 6: attention deviation against recompute ratio."""
    figure, axes = _figure(title, 2)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(line.selector for line in lines))}
    for line in lines:
        style: dict[str, Any] = {"color": colours[line.selector], "ls": _STYLES[line.cache], "marker": "."}
        label = f"{line.selector}, {line.cache}"
        axes[0].errorbar(line.ratios, line.question, line.question_error, label=label, capsize=2, **style)
        axes[1].errorbar(line.ratios, line.last, line.last_error, label=label, capsize=2, **style)
    for axis, rows in zip(axes, ("the question's tokens", "the last token"), strict=True):
        axis.set_xlabel("recompute ratio (share of the reusable tokens)")
        axis.set_ylabel(f"attention deviation of {rows}\n(1 = unprimed, nothing recomputed; bars: standard error)")
        axis.set_ylim(bottom=0)
    return _write(figure, axes, lines, title, path)


def plot_deviation(lines: Sequence[DeviationLine], title: str, path: Path) -> list[Path]:
    """Figure 7: distribution of the tokens' KV deviation."""
    figure, axes = _figure(title)
    layers = sorted({line.layer for line in lines})
    for line in lines:
        colour = f"C{layers.index(line.layer)}"
        label = f"layer {line.layer}, {line.cache}"
        axes[0].plot(line.percentiles, np.linspace(0, 1, 101), color=colour, ls=_STYLES[line.cache], label=label)
    axes[0].set_xlabel("KV deviation of a token (1 = the mean norm of the layer's keys and values)")
    axes[0].set_ylabel("share of the tokens (cumulative)")
    return _write(figure, axes, lines, title, path)


def plot_ranks(lines: Sequence[RankLine], title: str, path: Path) -> list[Path]:
    """Figure 8: rank correlation of the tokens' KV deviation between neighbouring layers."""
    figure, axes = _figure(title)
    for i, line in enumerate(lines):
        axes[0].plot(line.layers, line.mean, color=f"C{i}", ls=_STYLES[line.cache], marker=".", label=line.cache)
        axes[0].fill_between(line.layers, line.lowest, line.highest, color=f"C{i}", alpha=0.15, lw=0)
    axes[0].set_xlabel("layer (compared with the next one)")
    axes[0].set_ylabel("Spearman rank correlation of KV deviation\n(mean; band: lowest to highest of the prompts)")
    axes[0].set_ylim(top=1.02)
    return _write(figure, axes, lines, title, path)


def _figure(title: str, columns: int = 1) -> tuple[Figure, list[Axes]]:
    # Not pyplot: its global state and choice of a window system are nothing for a library.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _write(
    figure: Figure,
    axes: Iterable[Axes],
    lines: Sequence[AttentionLine | DeviationLine | RankLine],
    title: str,
    path: Path,
) -> list[Path]:
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    png, numbers = path.with_suffix(".png"), path.with_suffix(".json")
    figure.savefig(png, dpi=150)
    record = {"title": title, "lines": [asdict(line) for line in lines]}
    numbers.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
    return [png, numbers]
