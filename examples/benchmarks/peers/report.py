"""Results as JSON, one file a peer, and as one page of Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Result, Row
from prompts import CASES

from rag_blend.evaluation.report import markdown_table, write_texts

SHORTEST_PREPARATION_S = 0.05  # what is shorter is a peer's answer that it has nothing to prepare
_CASES = {
    "cold": "cold",
    "repeat": "same prompt again",
    "prefix": "same beginning, other question",
    "reordered": "same chunks, other order",
}
_NOTES = """\
Every peer gets every prompt in turn; the others wait meanwhile. Times are from handing over a prompt until its first
token is known to the driver: medians, and lowest to highest. When it is not cold, the peer was given the prompt's head
and chunks to prepare, if it can, and one prompt with the same chunks was asked before. KL is that of the first token's
distribution to full prefill's ({reference}, float32), in nats, mean; behind it, how many first tokens are the same.
Cores used are CPU seconds by seconds, medians: where they are below the threads, somebody else had the machine.
Cached are the prompt's tokens that came from a cache, by the peer's own account.
"""


def json_of(result: Result) -> dict[str, Any]:
    """One peer's file."""
    return {
        "peer": result.peer,
        "version": result.version,
        "settings": dict(result.settings),
        "error": result.error or None,
        "rows": [asdict(row) | {"kl": row.kl} for row in result.rows.values()],
    }


def markdown_of(results: Sequence[Result], environment: Mapping[str, str], reference: str) -> str:
    """All peers in tables by length, then what they are, then who is missing."""
    parts = ["# Peers", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    parts += [_NOTES.format(reference=reference)]
    for length in sorted({length for result in results for _, length in result.rows}):
        rows = {
            result.peer: {case: row for (case, of), row in result.rows.items() if of == length} for result in results
        }
        parts += [f"## {length:,} tokens in chunks", ""]
        for title, show in _TABLES:
            parts += [title, "", *markdown_table(_table(rows, show)), ""]
    parts += ["## What they are", ""]
    parts += [f"- **{one.peer}** {one.version}: {_listed(one.settings)}" for one in results if one.version]
    if failed := [f"- **{one.peer}**: {one.error}" for one in results if one.error]:
        parts += ["", "## Left out, or stopped", "", *failed]
    return "\n".join(parts) + "\n"


def write(results: Sequence[Result], environment: Mapping[str, str], reference: str, directory: Path) -> list[Path]:
    """Write ``<peer>.json`` for each peer and ``peers.md``; returns their paths.

    Raises:
        OSError: They cannot be written.
    """
    files = {f"{one.peer}.json": json.dumps(json_of(one), indent=2, allow_nan=False) + "\n" for one in results}
    files["peers.md"] = markdown_of(results, environment, reference)
    return write_texts(directory, files)


def _time(row: Row) -> str:
    median = f"{statistics.median(row.ttft_s):.3f}"
    return f"{median} ({min(row.ttft_s):.3f} to {max(row.ttft_s):.3f})" if len(row.ttft_s) > 1 else median


def _quality(row: Row) -> str:
    same = f"{sum(row.same_top1)} of {len(row.same_top1)}" if row.same_top1 else ""
    return ", ".join(filter(None, (f"{row.kl:.3g}" if row.kl is not None else "", same)))


def _effort(row: Row) -> str:
    cores = statistics.median(cpu / wall for cpu, wall in zip(row.cpu_s, row.ttft_s, strict=True))
    prepare_s = statistics.median(row.prepare_s or [0.0])
    prepared = f", prepared in {prepare_s:.1f} s" if prepare_s >= SHORTEST_PREPARATION_S else ""
    return f"{statistics.median(row.cpu_s):.3f} s on {cores:.1f}{prepared}"


def _tokens(row: Row) -> str:
    cached = f"{statistics.median(row.cached_tokens):,.0f}" if row.cached_tokens else "?"
    return f"{cached} of {statistics.median(row.prompt_tokens):,.0f}"


_TABLES: list[tuple[str, Callable[[Row], str]]] = [
    ("Time to first token, seconds:", _time),
    ("KL to full prefill, and same first tokens:", _quality),
    ("CPU time, cores used, and time to prepare:", _effort),
    ("Cached and all tokens of prompts:", _tokens),
]


def _table(peers: Mapping[str, Mapping[str, Row]], show: Callable[[Row], str]) -> list[list[str]]:
    header = ["", *(_CASES[case] for case in CASES)]
    return [header] + [
        [peer, *(show(rows[case]) if case in rows else "" for case in CASES)] for peer, rows in peers.items() if rows
    ]


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
