"""Times to first token of other programs, as their own processes have measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rag_blend.evaluation.report import markdown_table
from rag_blend.evaluation.speed.report import TIMES, Row, View, number, text
from rag_blend.evaluation.speed.timing import summary

REFERENCE = "transformers"  # full prefill in float32: what the times and first tokens of others are compared with
_CASES = {"repeat": "same prompt", "prefix": "same prefix", "reordered": "other order"}

VIEW = View(
    name="peers",
    title="Peers",
    notes=f"""\
Other programs on the same prompts, each in a process of its own, one at work at a time. Timed from outside: from
handing over a prompt to its first token; medians, and from the fastest to the slowest run. Gain: the time of
{REFERENCE} by this one. KL: from full prefill in float32, nats, where a peer shows its logits. CPUs: CPU time by wall
time. Lost: runs that got less than 85 % of the CPUs that the best run of the same line got.
""",
    section=lambda row: f"{row['length']:,} tokens of chunks: {row['case']}",
    columns=[
        ("", text("peer")),
        *TIMES,
        ("gain", number("gain", ".2f", "x")),
        ("KL", number("kl", ".2g")),
    ],
    panels=lambda rows: [],
)


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per length, case and peer.

    Args:
        results: One per peer: ``{"peer", "version", "rows": [{"case", "length", "ttft_s", "cpu_s", "kl"}]}``, with
            times of single runs; ``"settings"`` and ``"error"`` may be there.

    Raises:
        LookupError: Something is missing.
    """
    rows = [
        {
            "peer": result["peer"],
            "case": _CASES.get(row["case"], row["case"]),
            "length": row["length"],
            **summary(row["ttft_s"], row["cpu_s"]),
            "kl": row["kl"],
        }
        for result in results
        for row in result["rows"]
        if row["ttft_s"]
    ]
    reference = {(row["length"], row["case"]): row["median_s"] for row in rows if row["peer"] == REFERENCE}
    for row in rows:
        known = reference.get((row["length"], row["case"]))
        row["gain"] = None if known is None else known / row["median_s"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return sorted(rows, key=lambda row: (row["length"], cases.index(row["case"])))


def versions(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: what took part, how it was set up, and what could not and why."""
    table = [["peer", "version", "settings"]]
    for result in results:
        settings = ", ".join(f"{name} {value}" for name, value in (result.get("settings") or {}).items())
        table.append([result["peer"], str(result["version"]), result.get("error") or settings])
    return markdown_table(table)
