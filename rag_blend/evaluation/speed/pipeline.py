"""The pipeline bench: how much of loading hides behind computing, by the speed of the store (arXiv 2405.16444)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.engine import BlendEngine
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import configuration_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.speed.contestants import Blending, FullPrefill
from rag_blend.evaluation.speed.report import TIMES, TIMES_NOTE, Line, Panel, Row, Rows, SpeedReport, View, number, text
from rag_blend.evaluation.speed.rounds import Round, Samples, run_rounds
from rag_blend.evaluation.speed.texts import Texts
from rag_blend.evaluation.speed.throttled import Link, ThrottledBackend
from rag_blend.evaluation.speed.timing import grouped, in_turns, summary, timed
from rag_blend.models.base import layers_of

# Or a slow store would be left alone, and computing would fill the time that it takes.
_UNCONTROLLED: Mapping[str, Any] = {"reuse_when": "possible", "recompute_ratio": None}


def measure_pipeline(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    length: int,
    rates: Sequence[float],
    policies: Sequence[Policy],
    rounds: int,
    out: Path,
    latency_s: float = 0.0,
    progress: bool = True,
) -> SpeedReport:
    """Measure TTFT from a store of each speed, beside loading alone and computing alone.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        texts: What prompts are made of.
        length: Tokens of the chunks in a prompt.
        rates: Speeds of the store, in 10^6 bytes per second.
        policies: How prompts are blended.
        rounds: How often each is measured, each time on another prompt.
        out: Keeps what was measured, so that a run resumes.
        latency_s: Of each read.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A prompt does not fit the context window.
        ValueError: A rate is not positive, or there is too little text.
        OSError: `out` cannot be used.
    """
    links = {rate: Link(rate * 1e6, latency_s) for rate in rates}
    chunks = [texts.chunks(max(1, length // texts.chunk_tokens)) for _ in range(rounds)]
    prompts = [texts.prompt(some, texts.question()) for some in chunks]
    settings = {
        "chunk tokens": texts.chunk_tokens,
        "tokens of chunks": length,
        "rounds": rounds,
        "texts": texts.source,
        "latency": f"{latency_s * 1e3:g} ms",
    }

    def prepare(stack: ExitStack) -> Round:
        bench = _Bench(model, tokenizer, links, policies, stack)
        bench.ingest([chunk for some in chunks for chunk in some], progress)
        bench.first_tokens(prompts[0])  # the first run of anything is not like the others
        return lambda turn: bench.round(prompts[turn], turn)

    asked = {"rates": list(rates), "policies": [policy.describe() for policy in policies]}
    configuration = configuration_of(model, tokenizer, bench=VIEW.name, prompts=prompts, **settings, **asked)
    samples = run_rounds(out, configuration, rounds, prepare, progress)
    return SpeedReport(VIEW, environment_of(model), settings, _rows(samples))


class _Bench:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        links: Mapping[float, Link],
        policies: Sequence[Policy],
        stack: ExitStack,
    ) -> None:
        self._num_layers = len(layers_of(model))
        self._links = links
        self._full = FullPrefill(model, tokenizer)
        self._backend = ThrottledBackend()
        self._blending = []
        for policy in policies:
            arguments = {**_UNCONTROLLED, **policy.engine_arguments}
            engine = BlendEngine(model, tokenizer, self._backend, **arguments, prefix_cache_bytes=0)
            self._blending.append(Blending(policy.name, stack.enter_context(engine), policy))

    def ingest(self, chunks: Sequence[str], progress: bool) -> None:
        for contestant in self._blending:
            contestant.ingest(chunks, progress)

    def first_tokens(self, prompt: str) -> None:
        for contestant in (self._full, *self._blending):
            contestant.first_token(prompt)

    def round(self, prompt: str, turn: int) -> Samples:
        """Each policy: from memory first, then from each store, each beside its loading alone."""
        full = timed(partial(self._full.first_token, prompt))
        samples: Samples = []
        for contestant in in_turns(self._blending, turn):
            samples += self._policy(contestant, prompt, full.wall_s, turn)
        return samples

    def _policy(self, contestant: Blending, prompt: str, full_s: float, turn: int) -> Samples:
        answer = partial(contestant.first_token, prompt)
        self._backend.through = None
        self._backend.reads.clear()
        compute = timed(answer)
        reads = list(self._backend.reads)
        samples = []
        for rate, link in in_turns(list(self._links.items()), turn):
            self._backend.through = link
            load = timed(partial(self._backend.replay, reads))
            self._backend.reads.clear()
            run = timed(answer)
            bound_s = pipeline_bound(load.wall_s, compute.wall_s, self._num_layers)
            samples.append(
                {
                    "policy": contestant.name,
                    "rate": rate,
                    "prompt_tokens": run.value.prompt_tokens,
                    "megabytes": sum(read.length for read in self._backend.reads) / 1e6,
                    "wall_s": run.wall_s,
                    "cpu_s": run.cpu_s,
                    "load_s": load.wall_s,
                    "compute_s": compute.wall_s,
                    "sum_s": load.wall_s + compute.wall_s,
                    "bound_s": bound_s,
                    "to_bound": run.wall_s / bound_s,
                    "full_s": full_s,
                }
            )
        self._backend.through = None
        return samples


def pipeline_bound(load_s: float, compute_s: float, num_layers: int) -> float:
    """The best a pipeline of layers can do: the slower of the two, and one layer of the other."""
    return max(load_s, compute_s) + min(load_s, compute_s) / num_layers


_MEDIANS = ("prompt_tokens", "megabytes", "load_s", "compute_s", "sum_s", "bound_s", "to_bound", "full_s")


def _rows(samples: Samples) -> list[Row]:
    rows: list[Row] = []
    for (policy, rate), runs in grouped(samples, "policy", "rate"):
        wall_s, cpu_s = [run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]
        medians = {name: statistics.median(run[name] for run in runs) for name in _MEDIANS}
        times = summary(wall_s, cpu_s)
        rows.append({"policy": policy, "rate": rate, **medians, **times, "ttft_s": wall_s, "cpu_s": cpu_s})
    return sorted(rows, key=lambda row: (row["policy"], row["rate"]))


def _panels(rows: Rows) -> list[Panel]:
    panels = []
    for (policy,), own in grouped(rows, "policy"):
        rates = [row["rate"] for row in own]
        lines = [Line("measured", rates, *([row[name] for row in own] for name in ("median_s", "min_s", "max_s")))]
        parts = {"max + layer": "bound_s", "sum": "sum_s", "load": "load_s",
                 "compute": "compute_s", "full prefill": "full_s"}  # fmt: skip
        lines += [Line(label, rates, [row[name] for row in own]) for label, name in parts.items()]
        panels.append(Panel(policy, "store, MB/s", "time to first token, s", lines))
    return panels


VIEW = View(
    name="pipeline",
    title="Loading behind computing",
    notes=f"""\
Time to first token from a store in memory whose reads all go through one line of a given speed, asleep while they
wait. Load: the very same reads, with nothing computed. Compute: the same prompt from memory. Sum: one after the other.
Max + layer: the slower of the two and one layer of the other, the best that a pipeline can do; by it: median of the
ratios. Engines reuse whatever is stored, and recompute no more where the store is slow.
{TIMES_NOTE}""",
    section=text("policy"),
    columns=[
        ("MB/s", number("rate", "g")),
        ("MB", number("megabytes", ".1f")),
        ("load s", number("load_s", ".3f")),
        ("compute s", number("compute_s", ".3f")),
        ("sum s", number("sum_s", ".3f")),
        ("max + layer s", number("bound_s", ".3f")),
        *TIMES,
        ("by max + layer", number("to_bound", ".2f")),
        ("full prefill s", number("full_s", ".3f")),
    ],
    panels=_panels,
)
