"""The ingestion bench: how much of the machine is left for prefilling when caches are made and stored."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from rag_blend.engine import BlendEngine
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import configuration_of
from rag_blend.evaluation.prompts import head_ids
from rag_blend.evaluation.speed.report import TIMES, TIMES_NOTE, Line, Panel, Row, Rows, SpeedReport, View, number, text
from rag_blend.evaluation.speed.rounds import Round, Samples, run_rounds
from rag_blend.evaluation.speed.texts import Texts
from rag_blend.evaluation.speed.timing import grouped, in_turns, summary, timed
from rag_blend.models.base import cache_argument_of
from rag_blend.prompt import chunk_ids

PLAIN = "plain batched prefill"
PRIMES = {"ingest, not primed": "none", "ingest, default": "sample"}
BATCH_TOKENS = 2048  # what ingestion puts into one batch


def measure_ingestion(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    num_chunks: int,
    rounds: int,
    out: Path,
    progress: bool = True,
) -> SpeedReport:
    """Ingest chunks into an empty store on disk, beside prefilling them in batches of the same size.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        texts: Where chunks come from.
        num_chunks: How many are ingested in a round; each round has others.
        rounds: How often it is done.
        out: Keeps what was measured, so that a run resumes; stores are below it while they are needed.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        ValueError: There is too little text.
        OSError: `out` cannot be used.
    """
    chunks = [texts.chunks(num_chunks) for _ in range(rounds)]
    settings = {"chunk tokens": texts.chunk_tokens, "chunks": num_chunks, "rounds": rounds, "texts": texts.source}

    def prepare(stack: ExitStack) -> Round:
        plain = _PlainPrefill(model, tokenizer)
        contestants: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
            PLAIN: plain.measure,
            **{name: partial(_ingest, model, tokenizer, out, prime) for name, prime in PRIMES.items()},
        }
        for measure in contestants.values():
            measure(chunks[0][:1])  # the first run of anything is not like the others
        return lambda turn: [
            {"contestant": name, **measure(chunks[turn])} for name, measure in in_turns(list(contestants.items()), turn)
        ]

    configuration = configuration_of(model, tokenizer, bench=VIEW.name, chunks=chunks)
    samples = run_rounds(out, configuration, rounds, prepare, progress)
    return SpeedReport(VIEW, environment_of(model), settings, _rows(samples))


class _PlainPrefill:
    """The model's decoder over batches of chunks, whose caches are dropped."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache_argument = cache_argument_of(model)

    def measure(self, chunks: Sequence[str]) -> dict[str, Any]:
        run = timed(partial(self._prefill, chunks))
        return {"tokens": run.value, "wall_s": run.wall_s, "cpu_s": run.cpu_s}

    @torch.no_grad()
    def _prefill(self, chunks: Sequence[str]) -> int:
        ids = sorted(chunk_ids(self._tokenizer, chunks), key=len, reverse=True)
        at_once = max(1, BATCH_TOKENS // len(ids[0]))
        for start in range(0, len(ids), at_once):
            batch = ids[start : start + at_once]
            rows = np.stack([np.pad(chunk, (0, len(batch[0]) - len(chunk))) for chunk in batch])
            input_ids = torch.from_numpy(rows).long().to(self._model.device)
            self._model.base_model(input_ids=input_ids, use_cache=True, **{self._cache_argument: DynamicCache()})
        return sum(map(len, ids))


def _ingest(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, prime: str, chunks: Sequence[str]
) -> dict[str, Any]:
    with (
        TemporaryDirectory(prefix="kv-", dir=out) as storage,
        BlendEngine(model, tokenizer, storage, prime=prime) as engine,
    ):
        ingest = partial(engine.ingest, chunks, head=head_ids(tokenizer), progress=False)
        run, again = timed(ingest), timed(ingest)
    report = run.value
    return {
        "tokens": report.tokens,
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
        "bytes": report.bytes,
        "again_s": again.wall_s,
    }


def _rows(samples: Samples) -> list[Row]:
    rows: list[Row] = []
    for (contestant,), runs in grouped(samples, "contestant"):
        row: dict[str, Any] = {
            "contestant": contestant,
            "tokens_per_s": statistics.median(run["tokens"] / run["wall_s"] for run in runs),
            **summary([run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]),
        }
        if contestant != PLAIN:
            row["bytes_per_token"] = statistics.median(run["bytes"] / run["tokens"] for run in runs)
            row["again_s"] = statistics.median(run["again_s"] for run in runs)
        rows.append(row)
    rows.sort(key=lambda row: [PLAIN, *PRIMES].index(row["contestant"]))
    return [{**row, "share": row["tokens_per_s"] / rows[0]["tokens_per_s"]} for row in rows]


def _panels(rows: Rows) -> list[Panel]:
    names = [str(row["contestant"]) for row in rows]
    speeds = [row["tokens_per_s"] for row in rows]
    return [Panel("Ingestion", "", "tokens/s", [Line("median", range(len(rows)), speeds)], names)]


VIEW = View(
    name="ingest",
    title="Ingestion",
    notes=f"""\
The same chunks into an empty store on disk. Plain: the model's decoder alone over the chunks, in batches of as many
tokens as ingestion takes at once ({BATCH_TOKENS}), behind no head, caches dropped. Not primed: each chunk behind the
head. Default: behind the head, and behind the head and a priming text, so that each chunk is computed and stored twice.
Again: seconds that ingesting the same chunks a second time takes.
{TIMES_NOTE}""",
    section=lambda row: "All chunks",
    columns=[
        ("", text("contestant")),
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("of plain", number("share", ".1%")),
        *TIMES,
        ("bytes/token", number("bytes_per_token", ",.0f")),
        ("again s", number("again_s", ".3f")),
    ],
    panels=_panels,
)
