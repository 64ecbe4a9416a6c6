"""Results of a speed bench: as data, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_blend.evaluation.report import json_text, markdown_table, write_texts

Row = Mapping[str, Any]  # numbers and names of one line, by column
Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel; `low` and `high` are the ends of its bars, or empty."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a plot.

    Attributes:
        title: What is shown.
        x_label: Of the horizontal axis, which is logarithmic.
        y_label: Of the vertical axis, which begins at 0.
        lines: What is drawn.
        names: Draw bars of the only line instead, under these names; from 0 on.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class View:
    """How the results of one bench are shown.

    Attributes:
        name: The bench's.
        title: A heading.
        notes: What was measured, how, and what the columns mean.
        section: Heading of the table that a row belongs to.
        columns: Names of columns, and what stands in them.
        panels: What a plot of all rows shows.
    """

    name: str
    title: str
    notes: str
    section: Callable[[Row], str]
    columns: Sequence[tuple[str, Callable[[Row], str]]]
    panels: Callable[[Rows], Sequence[Panel]]


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """Results of a run.

    Attributes:
        view: How they are shown.
        environment: Names and values of what the numbers depend on.
        settings: What the run was asked for.
        rows: The results.
    """

    view: View
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Rows

    def to_json(self) -> str:
        """All of it; null for what is not finite."""
        data = {
            "bench": self.view.name,
            "environment": dict(self.environment),
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
        }
        return json_text(data)

    def tables(self) -> dict[str, list[list[str]]]:
        """By section, a table as text, header first; columns that are empty in all of its rows are left out."""
        sections: dict[str, list[Row]] = {}
        for row in self.rows:
            sections.setdefault(self.view.section(row), []).append(row)
        return {section: self._table(rows) for section, rows in sections.items()}

    def to_markdown(self, level: int = 1) -> str:
        """The same for people.

        Args:
            level: Of the heading.
        """
        told = [f"- {name}: {value}" for name, value in {**self.environment, **self.settings}.items()]
        parts = [f"{'#' * level} {self.view.title}", "", self.view.notes, *told, ""]
        for section, table in self.tables().items():
            parts += [f"{'#' * (level + 1)} {section}", "", *markdown_table(table), ""]
        return "\n".join(parts)

    def write(self, directory: Path) -> list[Path]:
        """Write ``NAME.json`` and ``NAME.md``, named after the bench; returns their paths.

        Raises:
            OSError: They cannot be written.
        """
        name = self.view.name
        return write_texts(directory, {f"{name}.json": self.to_json(), f"{name}.md": self.to_markdown()})

    def _table(self, rows: Rows) -> list[list[str]]:
        header = [name for name, _ in self.view.columns]
        table = [header, *([show(row) for _, show in self.view.columns] for row in rows)]
        used = [at for at in range(len(header)) if any(line[at] for line in table[1:])]
        return [[line[at] for at in used] for line in table]


def number(name: str, form: str, unit: str = "") -> Callable[[Row], str]:
    """Shows a column's number; nothing where there is none."""
    return lambda row: "" if row.get(name) is None else f"{row[name]:{form}}{unit}"


def text(name: str) -> Callable[[Row], str]:
    """Shows a column's text."""
    return lambda row: str(row[name])


def seconds(row: Row) -> str:
    """Median, and from the fastest to the slowest run."""
    return f"{row['median_s']:.3f} ({row['min_s']:.3f}-{row['max_s']:.3f})"


TIMES: Sequence[tuple[str, Callable[[Row], str]]] = [
    ("median s (range)", seconds),
    ("CPU s", number("median_cpu_s", ".3f")),
    ("CPUs", number("cpus", ".2f")),
    ("lost", number("lost", "d")),
]
TIMES_NOTE = """\
Times are medians of the rounds, with the range from the fastest to the slowest. In a round all take turns, another one
first in each. CPUs: CPU time by wall time. Lost: runs that got less than 85 % of the CPUs that the best run of the same
line got; something else was running then.
"""
