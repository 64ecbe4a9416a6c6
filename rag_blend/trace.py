"""What happened to one prompt: the fate of each token, the chunks that lie in it, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rag_blend.catalog import Findings
from rag_blend.chunk import LayerKV
from rag_blend.plan import BlendPlan, Positions, Segment
from rag_blend.rows import LayerSource

Outcome = Literal["exact", "blended", "declined", "elsewhere", "lost", "damaged"]
Part = Literal["tokenise", "queue", "plan", "storage", "select", "compute"]


class Kind(IntEnum):
    """Where the keys and values of a prompt token come from; `GenerationStats` counts the same four."""

    PREFIX = 0
    REUSED = 1
    RECOMPUTED = 2
    FRESH = 3


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """A stored chunk, or a part of one, that lies in a prompt.

    Attributes:
        key: Its key.
        outcome: ``"exact"``: reused as it is, since it was cached behind the very tokens in front of it.
            ``"blended"``: reused, and repaired as far as the selector saw fit. ``"declined"``: left alone, because
            computing it was expected to take no longer. The others are misses: ``"elsewhere"``: cached behind another
            head. ``"lost"``: gone, damaged at its beginning, or not delivered in time. ``"damaged"``: its rows are not
            what was written.
        start: First prompt position. A lost chunk's place may be unknown: then this, like the rest, is 0.
        end: One past the last prompt position.
        offset: The chunk's token that stands at `start`.
        num_tokens: Tokens of the whole chunk.
    """

    key: str
    outcome: Outcome
    start: int = 0
    end: int = 0
    offset: int = 0
    num_tokens: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def is_hit(self) -> bool:
        """Whether it was laid out in the prompt."""
        return self.outcome in ("exact", "blended")

    @property
    def is_miss(self) -> bool:
        """Whether it could not be used."""
        return not self.is_hit and self.outcome != "declined"

    @property
    def cut_behind(self) -> int:
        """Tokens of the chunk that do not stand behind this part; `offset` says how many do not in front."""
        return self.num_tokens - self.offset - len(self)


class Seconds(NamedTuple):
    """Where the time to first token went.

    Attributes:
        tokenise: From text to token ids.
        queue: Until the model was free, other prompts of the same batch included.
        plan: Finding stored chunks and earlier prompts, and laying them out.
        storage: Waiting for stored rows: what the computation did not hide.
        select: Choosing the tokens to recompute, a look ahead included.
        compute: The model's forward, and choosing the first token.
    """

    tokenise: float = 0.0
    queue: float = 0.0
    plan: float = 0.0
    storage: float = 0.0
    select: float = 0.0
    compute: float = 0.0

    @property
    def total(self) -> float:
        """Time to first token."""
        return sum(self)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What happened to one prompt. Arrays are read-only.

    Attributes:
        token_ids: The prompt, int32, shape (num_tokens,).
        kinds: A `Kind` per token, uint8, shape (num_tokens,).
        chunks: The stored chunks that lie in it, in the order of their places; lost ones without a place come first.
        kept: So many tokens at the start are those of an earlier prompt.
        scores: Attention that each token receives from the end of the question, averaged over heads, question tokens
            and layers, float32, shape (num_tokens,); None where the selector did not ask.
        seconds: Where the time to first token went.
        tokenizer: Of the model.
    """

    token_ids: np.ndarray
    kinds: np.ndarray
    chunks: tuple[TracedChunk, ...]
    kept: int
    scores: np.ndarray | None
    seconds: Seconds
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    def count(self, kind: Kind, start: int = 0, end: int | None = None) -> int:
        """How many tokens of a stretch, or of the whole prompt, are of this kind."""
        return int(np.count_nonzero(self.kinds[start:end] == kind))

    def owners(self) -> np.ndarray:
        """Which of `chunks` each token lies in, hits before misses, int64, shape (num_tokens,); -1: in none."""
        owners = np.full(len(self), -1)
        for index, chunk in sorted(enumerate(self.chunks), key=lambda pair: pair[1].is_hit):
            owners[chunk.start : chunk.end] = index
        return owners


class TraceRecorder:
    """Collects the trace of a prompt while it is served, always: it takes clock readings and references, no copies.

    Not thread-safe: a prompt is in the hands of one thread at a time.

    Attributes:
        started: When the caller called, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._turns: list[tuple[float, Part]] = [(self.started, "tokenise")]
        self._plan = self._possible = BlendPlan(0, ())
        self._found = Findings([], [], [], [])
        self._lost: list[TracedChunk] = []
        self._recomputed: Positions | None = None
        self._scores: np.ndarray | None = None

    def turn(self, part: Part) -> Part:
        """From now on time goes to `part`; returns what it went to."""
        before = self._turns[-1][1]
        self._turns.append((time.perf_counter(), part))
        return before

    def awaited(self, source: LayerSource) -> LayerSource:
        """The same rows, the waiting for which goes to ``"storage"``."""
        return _Awaited(source, self)

    def plan(self, plan: BlendPlan, found: Findings, possible: BlendPlan) -> None:
        """Take note of a plan, in place of an earlier one that came to nothing.

        Args:
            plan: What is reused.
            found: What lies in the prompt.
            possible: What could be reused.
        """
        self._plan, self._found, self._possible = plan, found, possible
        self._recomputed = self._scores = None
        self._lost += [TracedChunk(key, "lost") for key in found.lost]

    def lose(self, keys: Iterable[str], damaged: bool) -> None:
        """Take note that chunks of the plan could not be read."""
        lost = set(keys)
        segments = (segment for segment in self._plan.segments if segment.key in lost)
        self._lost += [self._traced(segment, "damaged" if damaged else "lost") for segment in segments]

    def look_ahead(self, scores: np.ndarray) -> None:
        """Take note of the attention that each token receives, float32, shape (num_tokens,)."""
        self._scores = scores

    def recompute(self, positions: Positions) -> None:
        """Take note of the reusable tokens that were computed."""
        self._recomputed = positions

    def trace(self, token_ids: np.ndarray, tokenizer: PreTrainedTokenizerBase, until: float) -> Trace:
        """The trace of the prompt whose first new token came at `until`."""
        kinds = np.full(len(token_ids), Kind.FRESH, dtype=np.uint8)
        kinds[: self._plan.kept] = Kind.PREFIX if self._plan.kept_exact else Kind.REUSED
        for segment in self._plan.segments:
            kinds[segment.start : segment.end] = Kind.PREFIX if segment.exact else Kind.REUSED
        if self._recomputed is not None:
            kinds[self._recomputed] = Kind.RECOMPUTED
        scores = None if self._scores is None else _read_only(self._scores)
        seconds, kept = self._seconds(until), self._plan.kept
        return Trace(_read_only(token_ids), _read_only(kinds), self._chunks(), kept, scores, seconds, tokenizer)

    def _chunks(self) -> tuple[TracedChunk, ...]:
        hits = [self._traced(segment, "exact" if segment.exact else "blended") for segment in self._plan.segments]
        left = [segment for segment in self._possible.segments if segment.key not in self._plan.keys]
        declined = [self._traced(segment, "declined") for segment in left]
        elsewhere = [
            TracedChunk(m.key, "elsewhere", m.start, m.end, m.offset, m.chunk_tokens) for m in self._found.elsewhere
        ]
        chunks = [*hits, *declined, *elsewhere, *self._lost]
        return tuple(sorted(chunks, key=lambda chunk: (chunk.start, chunk.end)))

    def _traced(self, segment: Segment, outcome: Outcome) -> TracedChunk:
        matches = (*self._found.prefix, *self._found.chunks)
        num_tokens = next(match.chunk_tokens for match in matches if match.key == segment.key)
        return TracedChunk(segment.key, outcome, segment.start, segment.end, segment.offset, num_tokens)

    def _seconds(self, until: float) -> Seconds:
        spent = dict.fromkeys(Seconds._fields, 0.0)
        ends = [*(min(at, until) for at, _ in self._turns), until]  # while decoding there may be turns, too
        for (begun, ended), (_, part) in zip(pairwise(ends), self._turns, strict=True):
            spent[part] += ended - begun
        return Seconds(**spent)


class _Awaited:
    def __init__(self, source: LayerSource, record: TraceRecorder) -> None:
        self._source = source
        self._record = record

    def layer(self, layer_idx: int) -> LayerKV:
        before = self._record.turn("storage")
        try:
            return self._source.layer(layer_idx)
        finally:
            self._record.turn(before)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
