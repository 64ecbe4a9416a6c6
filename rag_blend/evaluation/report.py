"""The report of a quality run: as data, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rag_blend.evaluation.bootstrap import Interval
from rag_blend.evaluation.results import CaseResult
from rag_blend.evaluation.summary import Count, Summary, summarise

_NOTES = """\
Reference: the greedy answer of full prefill. KL (nats, full || policy) and agreement are means over the positions of
that answer, given its tokens (teacher forcing), and then over cases. "KL / published" is a ratio of means. Brackets
hold 95 % intervals (paired bootstrap over cases, 2,000 resamples). "Full again" and "r = 1" are floors: the same
computation a second time, and through the blending code, on the first cases. Gain: full prefill's time to first token
(of `generate`; a few milliseconds more than a policy's, which is until the logits) by the policy's, mean over cases.
Recomputed charges what a selector computes in order to choose. False abstentions: answerable, and only the policy
says that there is no answer; lost ones: unanswerable, and only full prefill says so. Blended: cases in which stored
chunks were used at all. TTFT is of prompts whose passages all were in the store.
"""


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Results of a run.

    Attributes:
        results: One per case.
        environment: Names and values of what the numbers depend on.
        policies: What each policy was, as `Policy.describe` gives it.
        groups: Summaries by data set and task; each list begins with full prefill and the floors.
    """

    results: Sequence[CaseResult]
    environment: Mapping[str, str]
    policies: Sequence[Mapping[str, Any]]
    groups: Mapping[str, list[Summary]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", summarise(self.results))

    def prompt_lengths(self, group: str) -> tuple[int, float, int]:
        """Shortest, median and longest prompt of a group, in tokens."""
        lengths = [int(r.full.stats["prompt_tokens"]) for r in self.results if r.group == group]
        return min(lengths), statistics.median(lengths), max(lengths)

    def to_json(self) -> str:
        """Environment, policies and summaries; NaN becomes null. Results of single cases stay in the journal."""
        groups = {
            group: {"prompt_tokens": self.prompt_lengths(group), "summaries": [_named(line) for line in lines]}
            for group, lines in self.groups.items()
        }
        data = {"environment": dict(self.environment), "policies": list(self.policies), "groups": groups}
        return json_text(data)

    def to_markdown(self) -> str:
        """The same for people: one table per group, with the columns that mean something there."""
        environment = [f"- {name}: {value}" for name, value in self.environment.items()]
        parts = ["# Quality against full prefill", "", *environment, "", _NOTES]
        for group, lines in self.groups.items():
            low, median, high = self.prompt_lengths(group)
            lengths = f"prompts of {low} to {high} tokens, median {median:g}"
            parts += [f"## {group}", "", f"n = {lines[0].num_cases}; {lengths}.", ""]
            parts += [*markdown_table(table_of(lines)), ""]
        return "\n".join(parts)

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``quality.json`` and ``quality.md``; returns their paths.

        Raises:
            OSError: They cannot be written.
        """
        return write_texts(directory, {"quality.json": self.to_json(), "quality.md": self.to_markdown()})


_COLUMNS: list[tuple[str, Callable[[Summary], str]]] = [
    ("KL", lambda s: _interval(s.kl, ".3g")),
    ("KL / published", lambda s: _interval(s.kl_to_published, ".3g")),
    ("KL of first token", lambda s: _interval(s.first_kl, ".3g")),
    ("agreement", lambda s: _interval(s.agreement, ".3f")),
    ("same first token", lambda s: _number(s.first_agreement, ".1%")),
    ("F1", lambda s: _interval(s.f1, ".3f")),
    ("F1 - full", lambda s: _interval(s.f1_gain, "+.3f")),
    ("F1 where full is right", lambda s: _interval(s.f1_where_full_is_right, ".3f")),
    ("exact", lambda s: _number(s.exact, ".1%")),
    ("false abstentions", lambda s: _count(s.false_abstentions)),
    ("lost abstentions", lambda s: _count(s.lost_abstentions)),
    ("verbatim", lambda s: _interval(s.verbatim, ".3f")),
    ("tokens", lambda s: _number(s.num_tokens, ".1f")),
    ("recomputed", lambda s: _number(s.recompute_ratio, ".1%")),
    ("TTFT", lambda s: f"{s.ttft_s:.3f} s"),
    ("gain", lambda s: _interval(s.gain, ".2f")),
    ("median gain", lambda s: f"{s.median_gain:.2f}x"),
    ("blended", lambda s: _count(s.blended)),
    ("misses", lambda s: str(s.misses)),
]


def table_of(lines: Sequence[Summary], columns: Sequence[str] | None = None) -> list[list[str]]:
    """A table of summaries as text, header first; columns that are empty in every line are left out.

    Args:
        lines: One per row.
        columns: Names of the columns wanted. None: all.
    """
    wanted = [(name, show) for name, show in _COLUMNS if columns is None or name in columns]
    table = [["", *(name for name, _ in wanted)], *([line.name, *(show(line) for _, show in wanted)] for line in lines)]
    full = [at for at in range(len(table[0])) if at == 0 or any(row[at] for row in table[1:])]
    return [[row[at] for at in full] for row in table]


def _interval(value: Interval | None, form: str) -> str:
    if value is None:
        return ""
    if math.isnan(value.estimate):
        return "-"
    return f"{value.estimate:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _count(value: Count | None) -> str:
    return "" if value is None else f"{value.cases}/{value.of}"


def _named(line: Summary) -> dict[str, Any]:
    """A summary with its intervals and counts as objects: in JSON a tuple would lose its names."""
    values = asdict(line)
    for name, value in values.items():
        if isinstance(value, Interval | Count):
            values[name] = value._asdict()
    return values


def markdown_table(table: Sequence[Sequence[str]]) -> list[str]:
    """A table, header first, as lines of Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], "|" + "---|" * len(table[0]), *lines[1:]]


def json_text(data: Any) -> str:
    """JSON-like data as a file's text; null for numbers that JSON does not have."""
    return json.dumps(_without_nan(data), indent=2, allow_nan=False) + "\n"


def write_texts(directory: str | os.PathLike[str], texts: Mapping[str, str]) -> list[Path]:
    """Write files of these names and texts; returns their paths.

    Raises:
        OSError: They cannot be written.
    """
    written = [Path(directory) / name for name in texts]
    Path(directory).mkdir(parents=True, exist_ok=True)
    for path, text in zip(written, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return written


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
