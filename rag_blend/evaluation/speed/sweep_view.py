"""How a sweep is shown: in short, case by case, a plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rag_blend.evaluation.speed.report import TIMES_NOTE, Line, Panel, Row, Rows, View, number, seconds
from rag_blend.evaluation.speed.rounds import Samples
from rag_blend.evaluation.speed.timing import grouped, summary

MOST = 1.05  # times full prefill's time: what reuse may cost where it does not help
_IN_SHORT = "in short"


def rows_of(samples: Samples, stores: Sequence[str]) -> list[Row]:
    """One row for each store and one for all, in short; then one for each case."""
    cases = [_row(key, runs) for key, runs in grouped(samples, "store", "length", "hits")]
    cases.sort(key=lambda row: (stores.index(row["store"]), row["length"], row["hits"]))
    return [*(_in_short(store, [row for row in cases if row["store"] == store]) for store in stores),
            _in_short("all", cases), *cases]  # fmt: skip


def _row(key: tuple[Any, ...], runs: Samples) -> dict[str, Any]:
    store, length, hits = key
    to_full = [run["to_full"] for run in runs]
    used, declined, missed = (sum(run[name] for run in runs) for name in ("used", "declined", "missed"))
    return {
        "store": store,
        "length": length,
        "hits": hits,
        "prompt_tokens": statistics.median(run["prompt_tokens"] for run in runs),
        "full_s": statistics.median(run["full_s"] for run in runs),
        **summary([run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]),
        "to_full": statistics.median(to_full),
        "least_to_full": min(to_full),
        "most_to_full": max(to_full),
        "declined": declined / found if (found := used + declined) else None,
        "missed": missed,
        "modes": dict(Counter(run["mode"] for run in runs).most_common()),
    }


def _in_short(store: str, cases: Rows) -> Row:
    gains = [1 / row["to_full"] for row in cases if row["hits"] == 1]
    return {
        "store": store,
        "cases": len(cases),
        "worst": max(row["to_full"] for row in cases),
        "above": sum(1 for row in cases if row["to_full"] > MOST),
        "gains": [min(gains), max(gains)] if gains else [],
    }


def _section(row: Row) -> str:
    return _IN_SHORT if "worst" in row else _named(row["store"])


def _named(store: str) -> str:
    return f"{store} MB/s" if store[0].isdigit() else store


def _store_in_short(row: Row) -> str:
    return _named(row["store"]) if "worst" in row else ""


def _gains(row: Row) -> str:
    ends = dict.fromkeys(f"{gain:.2f}x" for gain in row.get("gains", ()))
    return " to ".join(ends)


def _ratio(row: Row) -> str:
    return f"{row['to_full']:.2f} ({row['least_to_full']:.2f}-{row['most_to_full']:.2f})" if "to_full" in row else ""


def _modes(row: Row) -> str:
    modes = row.get("modes", {})
    return ", ".join(modes if len(modes) == 1 else (f"{mode} {count}" for mode, count in modes.items()))


def _panels(rows: Rows) -> list[Panel]:
    panels = []
    for (store,), cases in grouped((row for row in rows if "to_full" in row), "store"):
        columns = ("length", "to_full", "least_to_full", "most_to_full")
        lines = [
            Line(f"{hits:.3g} stored", *([row[name] for row in own] for name in columns))
            for (hits,), own in grouped(cases, "hits")
        ]
        panels.append(Panel(_named(store), "tokens of chunks", "time / full prefill's", lines))
    return panels


VIEW = View(
    name="control",
    title="Never slower than full prefill",
    notes=f"""\
Time to first token of an engine with its default settings, which decides by itself what is worth reusing, beside full
prefill of the same prompt (`reuse=False`, by an engine of its own). Each prompt is asked once.

- There is one engine for each store. It meets all cases in random order, and learns from them; nothing is kept of
  earlier prompts (`prefix_cache_bytes=0`). A first round of all cases, in which it learns most, is not counted.
- A prompt has chunks of an eighth of its length each. Stored: the share of them that were ingested before.
- By full: time by full prefill's, the median over rounds, with its range. Above: cases in which it exceeds {MOST:g}.
- Gain: full prefill's time by ours where all chunks are stored, over all lengths.
- Declined: of the stored chunks in a prompt, those left alone because computing them was expected to take no longer.
  The prompt's head is stored as well, and counts. Missed: stored chunks that the store did not give.
- Mode: full, blend, or prefix, if what was reused is exact; with the number of runs where they differ.
- A number as a store is MB/s: a store in memory, read through a line of that speed.

{TIMES_NOTE}""",
    section=_section,
    columns=[
        ("store", _store_in_short),
        ("cases", number("cases", "d")),
        ("worst by full", number("worst", ".2f")),
        (f"above {MOST:g}", number("above", "d")),
        ("gain", _gains),
        ("tokens of chunks", number("length", ",d")),
        ("stored", number("hits", ".1%")),
        ("full s", number("full_s", ".3f")),
        ("ours s (range)", lambda row: seconds(row) if "median_s" in row else ""),
        ("by full (range)", _ratio),
        ("CPUs", number("cpus", ".2f")),
        ("lost", number("lost", "d")),
        ("declined", number("declined", ".0%")),
        ("missed", number("missed", "d")),
        ("mode", _modes),
    ],
    panels=_panels,
)
