"""From samples to the tables of a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sessions import Case
from turns import Results

from rag_blend.evaluation.speed.report import Row, View, number, seconds, text
from rag_blend.evaluation.speed.timing import grouped, percentile, summary

_TITLES: Mapping[Case, str] = {
    "cold": "texts that nobody has met",
    "new": "new prompt",
    "repeat": "same prompt again",
    "reordered": "same chunks, other order",
}


def rows_of(results: Results) -> list[Row]:
    """One row for each load, case and server."""
    return [
        _row(clients, length, case, server, runs, results.reuse.get((server, length, case), {}))
        for (clients, length, case, server), runs in grouped(results.samples, "clients", "length", "case", "server")
    ]


def _row(
    clients: int, length: int, case: Case, server: str, runs: Sequence[Mapping[str, Any]], reuse: Mapping[str, int]
) -> Row:
    ttft_s = [one for run in runs for one in run["ttft_s"]]
    work = summary([run["wall_s"] for run in runs], [run["cpu_s"] for run in runs])
    cached = [one for run in runs for one in run["cached_tokens"]]
    gains = [run["gain"] for run in runs if run["gain"] is not None]
    same = [one for run in runs for one in run["same"] or ()]
    return {
        "clients": clients,
        "length": length,
        "case": case,
        "server": server,
        "median_s": statistics.median(ttft_s),
        "min_s": min(ttft_s),
        "max_s": max(ttft_s),
        "p95_s": percentile(ttft_s, 0.95),
        "gain": statistics.median(gains) if gains else None,
        "requests_per_s": statistics.median(len(run["ttft_s"]) / run["wall_s"] for run in runs),
        "tokens_per_s": statistics.median(run["new_tokens"] / run["wall_s"] for run in runs),
        "cpus": work["cpus"],
        "lost": work["lost"],
        "prompt_tokens": statistics.median(one for run in runs for one in run["prompt_tokens"]),
        "cached": statistics.median(cached) if cached else None,
        "reused": reuse.get("reused_tokens"),
        "recomputed": reuse.get("recomputed_tokens"),
        "same": f"{sum(same)} of {len(same)}" if same else "",
        "ttft_s": ttft_s,
    }


def _section(row: Row) -> str:
    clients = f"{row['clients']} client{'s' if row['clients'] > 1 else ''}"
    return f"{clients}, {row['length']:,} tokens of chunks: {_TITLES[row['case']]}"


VIEW = View(
    name="serving",
    title="vLLM's OpenAI server",
    notes="""\
Servers that all run at once; prompts go to each in turn, in an order that rotates, and only one computes at a time.
Streamed completions by the openai client, greedy, all of the same length.

- vllm: prefix caching off. vllm-prefix-caching: on. rag_blend-heads: on, and stored chunks are blended.
- Texts that nobody has met: not ingested either. New prompt: its chunks are ingested, and were in no prompt. Then the
  same prompt again, and its chunks in another order with another question. No text stands in two sessions.
- TTFT: from sending a request until its first token arrives, over all requests of all rounds: median, range, and the
  time that 95 % do not exceed. With several clients all send at the same moment.
- Gain: median TTFT of vllm in a round by this one's; median of the rounds. Requests/s and tokens/s (of answers): of a
  round, from the first request to the last token; medians.
- CPUs: CPU time of the server by time. Lost: rounds with less than 85 % of the CPUs of the best round of the same line;
  something else was running then.
- Cached: prompt tokens that the server did not compute in its ordinary steps (usage.prompt_tokens_details): vLLM's own
  prefix cache, and all that is blended, recomputed rows included. Reused and recomputed: what a blend took from the
  store and computed (kv_transfer_params), of one warm-up request, because vLLM does not stream this. What its prefix
  cache had already is in neither.
- Same: first pieces of answers that are the same as vllm's.
""",
    section=_section,
    columns=[
        ("", text("server")),
        ("prompt tokens", number("prompt_tokens", ",.0f")),
        ("TTFT s (range)", seconds),
        ("p95 s", number("p95_s", ".3f")),
        ("gain", number("gain", ".2f", "x")),
        ("requests/s", number("requests_per_s", ".2f")),
        ("tokens/s", number("tokens_per_s", ".1f")),
        ("CPUs", number("cpus", ".2f")),
        ("lost", number("lost", "d")),
        ("cached", number("cached", ",.0f")),
        ("reused", number("reused", ",d")),
        ("recomputed", number("recomputed", ",d")),
        ("same", text("same")),
    ],
    panels=lambda rows: [],
)
