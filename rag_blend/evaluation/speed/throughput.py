"""The throughput bench: many requests at once, by engines with and without reuse."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.engine import BlendEngine
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import configuration_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.prompts import adds_special_tokens, head_ids
from rag_blend.evaluation.speed import gpu
from rag_blend.evaluation.speed.memory import forget_peak, peak_bytes
from rag_blend.evaluation.speed.report import TIMES, TIMES_NOTE, Line, Panel, Row, Rows, SpeedReport, View, number, text
from rag_blend.evaluation.speed.rounds import Round, Samples, run_rounds
from rag_blend.evaluation.speed.texts import Texts
from rag_blend.evaluation.speed.timing import grouped, in_turns, percentile, summary, timed
from rag_blend.generation import Generation

FULL = "full prefill"
POLICIES = {
    FULL: Policy.parse("sample/heads"),  # called with reuse=False
    "rag_blend, heads": Policy.parse("sample/heads"),
    "rag_blend, default": Policy.parse("default"),
}
_USES = 4  # how many prompts a chunk stands in, on average


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine.

    Attributes:
        requests: How many requests there are in a run.
        concurrency: Numbers of clients; each client sends its next request when it has its answer.
        new_tokens: Longest answer.
    """

    requests: int = 32
    concurrency: Sequence[int] = (1, 4, 16)
    new_tokens: int = 16


def measure_throughput(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    length: int,
    load: Load,
    rounds: int,
    out: Path,
    progress: bool = True,
) -> SpeedReport:
    """Send the same requests to each engine, by one client and by several at once.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        texts: What prompts are made of.
        length: Tokens of the chunks in a prompt.
        load: What is asked.
        rounds: How often all of it is done.
        out: Keeps what was measured, so that a run resumes; caches are below it while it runs.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A prompt does not fit the context window.
        ValueError: There is too little text.
        OSError: `out` cannot be used.
    """
    per_prompt = max(1, length // texts.chunk_tokens)
    pool = texts.chunks(max(per_prompt, load.requests * per_prompt // _USES))
    rng = random.Random(0)
    prompts = [texts.prompt(rng.sample(pool, per_prompt), texts.question()) for _ in range(load.requests)]
    settings = {
        "chunk tokens": texts.chunk_tokens,
        "tokens of chunks": length,
        "requests": load.requests,
        "longest answer": load.new_tokens,
        "rounds": rounds,
        "texts": texts.source,
    }
    cells = [(name, clients) for clients in load.concurrency for name in POLICIES]

    def prepare(stack: ExitStack) -> Round:
        storage = stack.enter_context(TemporaryDirectory(prefix="kv-", dir=out))
        asks = {}
        for name, policy in POLICIES.items():
            engine = stack.enter_context(
                BlendEngine(model, tokenizer, storage, **policy.engine_arguments, prefix_cache_bytes=0)
            )
            engine.ingest(pool, head=head_ids(tokenizer), progress=progress)
            asks[name] = _ask(engine, policy, name != FULL, load.new_tokens)
            asks[name](prompts[0])  # the first run of anything is not like the others
        return lambda turn: [
            {"contestant": name, "clients": clients, **_run(asks[name], prompts, clients)}
            for name, clients in in_turns(cells, turn)
        ]

    configuration = configuration_of(
        model, tokenizer, bench=VIEW.name, prompts=prompts, concurrency=list(load.concurrency), **settings
    )
    return SpeedReport(
        VIEW, environment_of(model), settings, _rows(run_rounds(out, configuration, rounds, prepare, progress))
    )


def _ask(engine: BlendEngine, policy: Policy, reuse: bool, new_tokens: int) -> Callable[[str], Generation]:
    special = adds_special_tokens(engine.tokenizer)
    return partial(
        engine.generate,
        max_new_tokens=new_tokens,
        add_special_tokens=special,
        reuse=reuse,
        do_sample=False,
        **policy.call_arguments,
    )


def _run(ask: Callable[[str], Generation], prompts: Sequence[str], clients: int) -> dict[str, Any]:
    def answer(prompt: str) -> tuple[float, int, int]:
        started = time.perf_counter()
        generation = ask(prompt)
        return time.perf_counter() - started, len(generation.token_ids), generation.stats.prompt_tokens

    gpu.forget_peak()
    tells_peak = forget_peak()
    with ThreadPoolExecutor(clients) as pool:
        run = timed(lambda: list(pool.map(answer, prompts)))
    latencies, new_tokens, prompt_tokens = zip(*run.value, strict=True)
    return {
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
        "requests_per_s": len(prompts) / run.wall_s,
        "tokens_per_s": sum(new_tokens) / run.wall_s,
        "prompt_tokens": statistics.median(prompt_tokens),
        "p50_s": percentile(latencies, 0.5),
        "p95_s": percentile(latencies, 0.95),
        "peak_bytes": peak_bytes() if tells_peak else None,
        "gpu_peak_bytes": gpu.peak_bytes(),
    }


_MEDIANS = ("requests_per_s", "tokens_per_s", "prompt_tokens", "p50_s", "p95_s")


def _rows(samples: Samples) -> list[Row]:
    rows: list[Row] = []
    for (clients, contestant), runs in sorted(grouped(samples, "clients", "contestant"), key=_by_clients):
        rows.append(
            {
                "clients": clients,
                "contestant": contestant,
                **{name: statistics.median(run[name] for run in runs) for name in _MEDIANS},
                **summary([run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]),
                "peak_gb": _most_gb(runs, "peak_bytes"),
                "gpu_peak_gb": _most_gb(runs, "gpu_peak_bytes"),
            }
        )
    full = {row["clients"]: row["requests_per_s"] for row in rows if row["contestant"] == FULL}
    return [{**row, "gain": row["requests_per_s"] / full[row["clients"]]} for row in rows]


def _most_gb(runs: Samples, name: str) -> float | None:
    peaks = [run[name] for run in runs if run.get(name) is not None]
    return max(peaks) / 1e9 if peaks else None


def _by_clients(group: tuple[tuple[Any, ...], Samples]) -> tuple[int, int]:
    (clients, contestant), _ = group
    return clients, list(POLICIES).index(contestant)


def _panels(rows: Rows) -> list[Panel]:
    panels = []
    for title, column in (("requests a second", "requests_per_s"), ("median latency, s", "p50_s")):
        lines = []
        for (contestant,), own in grouped(rows, "contestant"):
            lines.append(Line(contestant, [row["clients"] for row in own], [row[column] for row in own]))
        panels.append(Panel(title, "clients", "", lines))
    return panels


VIEW = View(
    name="throughput",
    title="Throughput",
    notes=f"""\
Each client sends its next request when it has its answer; all run on the same requests, greedily decoded. Chunks of a
prompt are drawn from a collection that has a quarter as many chunks as all prompts together, and all of it is ingested.
Engines keep no prompts in memory. Full prefill is the same engine with reuse=False, so it decodes requests that wait
together as well. Tokens/s: of answers. p50, p95: seconds from a request to its answer. Peak: memory of the process,
model and engines included; of a GPU, what tensors take there.
{TIMES_NOTE}""",
    section=lambda row: f"{row['clients']} client{'s' if row['clients'] > 1 else ''}",
    columns=[
        ("", text("contestant")),
        ("prompt tokens", number("prompt_tokens", ",.0f")),
        ("requests/s", number("requests_per_s", ".3f")),
        ("gain", number("gain", ".2f", "x")),
        ("tokens/s", number("tokens_per_s", ".1f")),
        ("p50 s", number("p50_s", ".2f")),
        ("p95 s", number("p95_s", ".2f")),
        *TIMES,
        ("peak GB", number("peak_gb", ".2f")),
        ("GPU peak GB", number("gpu_peak_gb", ".2f")),
    ],
    panels=_panels,
)
