"""One page of all benchmarks, from the JSON files that they have written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rag_blend.evaluation.speed import ingestion, matching, peers, pipeline, sweep_view, throughput, ttft_view
from rag_blend.evaluation.speed.plots import draw_plot
from rag_blend.evaluation.speed.report import SpeedReport

_VIEWS = {
    module.VIEW.name: module.VIEW for module in (ttft_view, pipeline, sweep_view, throughput, ingestion, matching)
}  # in the order of the page
_OPENING = """\
# Benchmarks

Made by `rag-blend bench ttft`, `pipeline`, `control`, `throughput`, `ingest` and `match`, and put together by
`rag-blend bench report`; each section says on which machine and with which settings. Other hardware gives other ones.
"""


class Results(NamedTuple):
    """What a page shows.

    Attributes:
        reports: Of our own benches, in the order of the page.
        peers: Of other programs, as read.
        files: Where each report, and then each of peers, was read.
    """

    reports: Sequence[SpeedReport]
    peers: Sequence[Mapping[str, Any]]
    files: Sequence[Path]

    def sections(self) -> list[tuple[str, list[Path]]]:
        """Title of each section of the page, and the files that it shows."""
        own = [(report.view.title, [file]) for report, file in zip(self.reports, self.files, strict=False)]
        foreign = list(self.files[len(self.reports) :])
        return [*own, (peers.VIEW.title, foreign)] if foreign else own


def read_results(directories: Sequence[Path]) -> Results:
    """Read all ``*.json`` files of directories that a speed bench, or one of peers, has written; others are ignored.

    Raises:
        OSError: One cannot be read.
        ValueError: One is damaged, or there are none.
    """
    reports: list[tuple[SpeedReport, Path]] = []
    others: list[tuple[Mapping[str, Any], Path]] = []
    for path in (path for directory in directories for path in sorted(directory.glob("*.json"))):
        try:
            data = json.loads(path.read_text("utf-8"))
            if not isinstance(data, dict):
                continue
            if data.get("bench") in _VIEWS:
                view = _VIEWS[data["bench"]]
                report = SpeedReport(view, data["environment"], data["settings"], data["rows"])
                report.tables()
                reports.append((report, path))
            elif "peer" in data:
                peers.rows_of([data])
                others.append((data, path))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not the results of a bench ({error!r})") from error
    if not reports and not others:
        raise ValueError(f"no results in {', '.join(map(str, directories))}; see rag-blend bench --help")
    order = list(_VIEWS.values())
    reports.sort(key=lambda read: order.index(read[0].view))
    return Results([one for one, _ in reports], [one for one, _ in others], [path for _, path in (*reports, *others)])


def page_of(results: Results, plots: Sequence[str] = ()) -> str:
    """The page, in Markdown.

    Args:
        results: What to show.
        plots: For each report, where its plot is, as the page links to it. Empty: there are none.
    """
    parts = [_OPENING]
    for at, report in enumerate(results.reports):
        parts.append(report.to_markdown(level=2))
        if plots:
            parts.append(f"![{report.view.title}]({plots[at]})\n")
    if results.peers:
        parts.append(SpeedReport(peers.VIEW, {}, {}, peers.rows_of(results.peers)).to_markdown(level=2))
        parts.append("\n".join([*peers.versions(results.peers), ""]))
    return "\n".join(parts)


def write_page(results: Results, path: Path) -> list[Path]:
    """Write the page, and plots to ``images`` beside it.

    Returns:
        The files that were written, the page first.

    Raises:
        ImportError: matplotlib is not installed (``pip install -e ".[bench]"``).
        OSError: They cannot be written.
    """
    plots = []
    for at, report in enumerate(results.reports):
        before = sum(1 for other in results.reports[:at] if other.view is report.view)
        plots.append(f"images/bench-{report.view.name}{f'-{before + 1}' if before else ''}.png")
        draw_plot(report, path.parent / plots[-1])
    path.write_text(page_of(results, plots), encoding="utf-8")
    return [path, *(path.parent / plot for plot in plots)]
