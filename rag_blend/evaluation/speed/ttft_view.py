"""How times to first token are shown: what many rounds say, tables, a plot."""

from __future__ import annotations

import statistics
from typing import Any

from rag_blend.evaluation.speed.report import TIMES, TIMES_NOTE, Line, Panel, Row, Rows, View, number, text
from rag_blend.evaluation.speed.rounds import Samples
from rag_blend.evaluation.speed.timing import grouped, summary

COLD, SAME_PROMPT, SAME_PREFIX, OTHER_ORDER = "cold", "same prompt", "same prefix", "other order"
CASES = (COLD, SAME_PROMPT, SAME_PREFIX, OTHER_ORDER)


def rows_of(samples: Samples) -> list[Row]:
    """One row per length, case and contestant."""
    return [_row(key, runs) for key, runs in grouped(samples, "length", "case", "contestant")]


def _row(key: tuple[Any, ...], runs: Samples) -> Row:
    length, case, contestant = key
    wall_s, cpu_s = [run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]
    beside = [run for run in runs if run["ideal_s"] is not None]
    return {
        "length": length,
        "case": case,
        "contestant": contestant,
        **{name: statistics.median(run[name] for run in runs) for name in ("prompt_tokens", "rows", "gain", "kl")},
        **summary(wall_s, cpu_s),
        "ttft_s": wall_s,
        "cpu_s": cpu_s,
        "ideal_s": statistics.median(run["ideal_s"] for run in beside) if beside else None,
        "to_ideal": statistics.median(run["wall_s"] / run["ideal_s"] for run in beside) if beside else None,
    }


def _panels(rows: Rows) -> list[Panel]:
    panels = []
    for case in CASES:
        lines = []
        for (contestant,), own in grouped((row for row in rows if row["case"] == case), "contestant"):
            columns = ("length", "median_s", "min_s", "max_s")
            lines.append(Line(contestant, *([row[name] for row in own] for name in columns)))
        panels.append(Panel(case, "tokens of chunks", "time to first token, s", lines))
    return panels


VIEW = View(
    name="ttft",
    title="Time to first token",
    notes=f"""\
From a prompt's text to its first token, timed from outside, in one process.

- Cold: nobody has met the chunks. Same prompt: the cold one again. Same prefix: the same chunks, another question.
- Other order: chunks that were ingested for rag_blend, and that a prefix cache has met in a prompt, in another order.
  An engine's memory of prompts is empty then.
- In the first three cases only the prompt's head is ingested, so rag_blend can only go on from the prompt before.
  Chunks that are ingested cost in every order what they cost in another one.
- rag_blend's engines decide by themselves whether reuse is worth it; the published method always reuses.
- The prefix cache is transformers' DynamicCache of the prompt before, cut where prompts differ.
- Gain: full prefill's time by this one, of the same round. KL: from full prefill's distribution of the first token,
  nats; of random words, where texts are such, it says little.
- Rows: computed in the mean layer, those included that were computed in order to choose. Ideal: the decoder's linear
  modules on so many rows, and their attention to the whole prompt, alone, on random numbers. By ideal: time by ideal.
- Gain, KL, rows, ideal and by ideal are medians of the rounds.

{TIMES_NOTE}""",
    section=lambda row: f"{row['length']:,} tokens of chunks: {row['case']}",
    columns=[
        ("", text("contestant")),
        ("prompt tokens", number("prompt_tokens", ",.0f")),
        *TIMES,
        ("gain", number("gain", ".2f", "x")),
        ("KL", number("kl", ".2g")),
        ("rows", number("rows", ",.0f")),
        ("ideal s", number("ideal_s", ".3f")),
        ("by ideal", number("to_ideal", ".2f")),
    ],
    panels=_panels,
)
