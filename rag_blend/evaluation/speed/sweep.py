"""The control bench: an engine that decides by itself what to reuse, beside full prefill, whatever the case."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.engine import BlendEngine, Storage
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import configuration_of
from rag_blend.evaluation.prompts import adds_special_tokens, head_ids
from rag_blend.evaluation.speed.report import SpeedReport
from rag_blend.evaluation.speed.rounds import Round, run_rounds
from rag_blend.evaluation.speed.sweep_view import VIEW, rows_of
from rag_blend.evaluation.speed.texts import Texts, require_fit
from rag_blend.evaluation.speed.throttled import Link, ThrottledBackend
from rag_blend.evaluation.speed.timing import in_turns, timed
from rag_blend.generation import GenerationStats
from rag_blend.ingest import MIN_CHUNK_TOKENS
from rag_blend.prompt import chunk_ids

CHUNKS = 8  # of a prompt
STORED = 16  # of each length: what prompts take their stored chunks from
_LEAST_LENGTH = CHUNKS * MIN_CHUNK_TOKENS
_LOCAL = ("memory", "disk")
_SEED = 0


class Case(NamedTuple):
    """One case of a sweep: tokens of a prompt's chunks, the share of them that is stored, and where."""

    length: int
    hits: float
    store: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is tried, each with each.

    Attributes:
        lengths: Tokens of the chunks in a prompt.
        hits: Shares of a prompt's chunks that are stored, in eighths.
        stores: ``"memory"``, ``"disk"``, or how many MB/s (10^6 bytes) go through a line to a store in memory.
        latency_s: Of each read through such a line.

    Raises:
        ValueError: One of them is not that.
    """

    lengths: Sequence[int]
    hits: Sequence[float]
    stores: Sequence[str]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lengths and self.hits and self.stores):
            raise ValueError("a sweep needs a length, a share of hits and a store at least")
        if min(self.lengths) < _LEAST_LENGTH:
            raise ValueError(f"length {min(self.lengths)} has no room for {CHUNKS} chunks: use {_LEAST_LENGTH} or more")
        for share in self.hits:
            if share not in [chunks / CHUNKS for chunks in range(CHUNKS + 1)]:
                raise ValueError(f"hits are eighths, 0, 0.125, ... 1, for a prompt has {CHUNKS} chunks; not {share:g}")
        for store in self.stores:
            if store not in _LOCAL:
                self.link_to(store)

    @property
    def cases(self) -> list[Case]:
        """All of them."""
        return [Case(length, hits, store) for store in self.stores for length in self.lengths for hits in self.hits]

    def link_to(self, store: str) -> Link:
        """A new line of the speed that a store's name says.

        Raises:
            ValueError: It says none.
        """
        try:
            rate = float(store)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise ValueError(f"a store is memory, disk, or a speed in MB/s, not {store!r}")
        return Link(rate * 1e6, self.latency_s)


def measure_control(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sweep: Sweep,
    rounds: int,
    out: Path,
    progress: bool = True,
) -> SpeedReport:
    """Measure every case by full prefill, and by one engine per store that meets all cases in random order.

    Prompts are random words. Each is asked once: its stored chunks are some of those ingested in the beginning, as a
    retriever finds them, in another choice and order; the others are new.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        sweep: The cases.
        rounds: How often each is measured, after one round that is not counted.
        out: Keeps what was measured, so that a run resumes; caches are below it while it runs.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A prompt does not fit the context window.
        OSError: `out` cannot be used.
    """
    prompts = _Prompts(tokenizer, sweep.lengths)
    warm_up, *counted = [prompts.of_round(sweep.cases) for _ in range(rounds + 1)]
    drawn = [(case, prompt, turn) for turn, asked in enumerate(counted) for case, prompt in asked]
    require_fit(model, tokenizer, (prompt for _, prompt in warm_up))
    settings = {
        "chunks in a prompt": CHUNKS,
        "stored chunks of each length": STORED,
        "latency of slow lines": f"{sweep.latency_s * 1e3:g} ms",
        "rounds": rounds,
        "texts": "random words",
    }

    def prepare(stack: ExitStack) -> Round:
        bench = _Bench(model, tokenizer, sweep, out, stack)
        bench.ingest(prompts.stored, progress)
        for case, prompt in tqdm(warm_up, desc="not counted", disable=not progress):
            bench.measure(case, prompt, 0)
        return lambda number: [bench.measure(*drawn[number])]

    configuration = configuration_of(model, tokenizer, bench=VIEW.name, warm_up=warm_up, drawn=drawn, **settings)
    samples = run_rounds(out, configuration, len(drawn), prepare, progress)
    return SpeedReport(VIEW, environment_of(model), settings, rows_of(samples, sweep.stores))


class _Prompts:
    """Makes up stored chunks, and prompts about some of them; the same ones for the same lengths and cases."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> None:
        self._rng = random.Random(_SEED)
        self._texts = {length: Texts(tokenizer, length // CHUNKS, seed=length) for length in lengths}
        self._stored = {length: _storable(texts, tokenizer) for length, texts in self._texts.items()}

    @property
    def stored(self) -> list[str]:
        """The chunks to be ingested."""
        return [chunk for chunks in self._stored.values() for chunk in chunks]

    def of_round(self, cases: Sequence[Case]) -> list[tuple[Case, str]]:
        """Every case once, in random order, each with a prompt of its own."""
        return [(case, self._prompt(case)) for case in self._rng.sample(cases, len(cases))]

    def _prompt(self, case: Case) -> str:
        texts = self._texts[case.length]
        chunks = self._rng.sample(self._stored[case.length], round(case.hits * CHUNKS))
        chunks += texts.chunks(CHUNKS - len(chunks))
        self._rng.shuffle(chunks)
        return texts.prompt(chunks, texts.question())


def _storable(texts: Texts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The next chunks but for those that cutting has made too short to be stored."""
    found: list[str] = []
    while len(found) < STORED:
        chunks = texts.chunks(STORED)
        lengths = map(len, chunk_ids(tokenizer, chunks))
        found += [chunk for chunk, length in zip(chunks, lengths, strict=True) if length >= MIN_CHUNK_TOKENS]
    return found[:STORED]


class _Bench:
    """An engine for full prefill, which nobody learns from, and one that decides for each store."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sweep: Sweep, out: Path, stack: ExitStack
    ) -> None:
        self._tokenizer = tokenizer
        self._links = {store: sweep.link_to(store) for store in sweep.stores if store not in _LOCAL}
        self._lines = {store: ThrottledBackend() for store in self._links}
        directory = stack.enter_context(TemporaryDirectory(prefix="kv-", dir=out))
        places: dict[str, Storage] = {**self._lines, "memory": None, "disk": directory}
        new_engine = partial(BlendEngine, model, tokenizer, prefix_cache_bytes=0)
        self._full = stack.enter_context(new_engine(None))
        self._engines = {store: stack.enter_context(new_engine(places[store])) for store in sweep.stores}

    def ingest(self, chunks: Sequence[str], progress: bool) -> None:
        """Store the chunks in each store; only then do the lines become slow."""
        for engine in self._engines.values():
            engine.ingest(chunks, head=head_ids(self._tokenizer), progress=progress)
        for store, line in self._lines.items():
            line.through = self._links[store]

    def measure(self, case: Case, prompt: str, turn: int) -> dict[str, Any]:
        """Both, another one first in each turn."""
        contestants = {
            "full": partial(self._first_token, self._full, prompt, reuse=False),
            "ours": partial(self._first_token, self._engines[case.store], prompt),
        }
        runs = {name: timed(contestants[name]) for name in in_turns(list(contestants), turn)}
        full, ours = runs["full"], runs["ours"]
        stats = ours.value
        return {
            **case._asdict(),
            "prompt_tokens": stats.prompt_tokens,
            "full_s": full.wall_s,
            "wall_s": ours.wall_s,
            "cpu_s": ours.cpu_s,
            "to_full": ours.wall_s / full.wall_s,
            "mode": stats.mode,
            "used": stats.hits,
            "declined": stats.declined,
            "missed": stats.misses,
        }

    def _first_token(self, engine: BlendEngine, prompt: str, reuse: bool = True) -> GenerationStats:
        prefill = engine.prefill(prompt, add_special_tokens=adds_special_tokens(self._tokenizer), reuse=reuse)
        int(prefill.logits.argmax())  # a GPU is waited for
        return prefill.stats
