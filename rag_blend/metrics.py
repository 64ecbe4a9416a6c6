"""What an engine has done so far, in numbers that a monitoring system takes; and one log line per answer."""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict
from itertools import accumulate
from typing import TypedDict

from rag_blend.generation import Generation, GenerationStats
from rag_blend.ingest import IngestReport
from rag_blend.shadow import DriftReport
from rag_blend.storage import StorageBackend, StorageStats

logger = logging.getLogger(__name__)
requests_logger = logging.getLogger("rag_blend.requests")

MODES = ("blend", "prefix", "full")
TOKEN_KINDS = ("prefix", "reused", "recomputed", "fresh", "generated")
NO_FAULTS = dict.fromkeys(("missing", "corrupt", "foreign", "unavailable"), 0)
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
LOAD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class HistogramFigures(TypedDict):
    """A distribution. `counts` is cumulative: how many were at most each of `bounds`; `count` is all of them."""

    bounds: list[float]
    counts: list[int]
    count: int
    sum: float


class TierFigures(TypedDict):
    """What a storage tier holds, and what happened there in this process; see `StorageStats`."""

    entries: int
    bytes: int
    quota_bytes: int | None
    counts: dict[str, int]


class AnswerFigures(TypedDict):
    """Answers given by ``generate``, ``generate_batch`` and ``stream``.

    `requests` is by mode, `tokens` by kind: those of the prompts (``prefix``, ``reused``, ``recomputed``, ``fresh``)
    and the ``generated`` ones. `hits`, `declined` and `misses` count stored chunks in the prompts, the last by reason:
    ``lost`` (not to be had, or damaged) or ``other_head``.
    """

    requests: dict[str, int]
    tokens: dict[str, int]
    hits: int
    declined: int
    misses: dict[str, int]
    ttft_s: HistogramFigures
    load_s: HistogramFigures


class Metrics(AnswerFigures):
    """A snapshot of `BlendEngine.metrics`, ready for JSON. Counts begin when the engine is made.

    `ingested` sums up the `IngestReport` of every ingestion; `faults` is `BlendEngine.counts`; `drift` is
    `BlendEngine.drift` with None where nothing was checked; `waiting` has the ``requests`` that wait for the model and
    the ``texts`` of ``ingest_later``; `chunks` is how many stored chunks prompts can use. `storage` is by tier, and
    empty when it was not asked for or the medium does not answer.
    """

    ingested: dict[str, float]
    faults: dict[str, int]
    drift: dict[str, float | None]
    waiting: dict[str, int]
    chunks: int
    storage: dict[str, TierFigures]


class Histogram:
    """Counts values by size. Not thread-safe.

    Args:
        bounds: Upper bounds of the buckets, ascending; one more bucket takes what is larger.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self) -> HistogramFigures:
        """The distribution so far."""
        *counts, count = accumulate(self._counts)
        return {"bounds": list(self._bounds), "counts": counts, "count": count, "sum": self._sum}


class MetricsRecorder:
    """Sums up answers and ingestions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = Counter(dict.fromkeys(MODES, 0))
        self._tokens = Counter(dict.fromkeys(TOKEN_KINDS, 0))
        self._misses = Counter(lost=0, other_head=0)
        self._hits = 0
        self._declined = 0
        self._ttft_s = Histogram(TTFT_BUCKETS_S)
        self._load_s = Histogram(LOAD_BUCKETS_S)
        self._ingested: Counter[str] = Counter(asdict(IngestReport()))

    def answered(self, generation: Generation) -> None:
        """Count an answer, and tell the log."""
        stats = generation.stats
        tokens = {kind: getattr(stats, f"{kind}_tokens") for kind in TOKEN_KINDS if kind != "generated"}
        with self._lock:
            self._requests[stats.mode] += 1
            self._tokens.update(tokens, generated=len(generation.token_ids))
            self._hits += stats.hits
            self._declined += stats.declined
            self._misses.update(lost=stats.misses - stats.misses_elsewhere, other_head=stats.misses_elsewhere)
            self._ttft_s.add(stats.ttft_s)
            self._load_s.add(stats.load_s)
        _log(stats, len(generation.token_ids))

    def ingested(self, report: IngestReport) -> None:
        """Count an ingestion."""
        with self._lock:
            self._ingested.update(asdict(report))

    def answers(self) -> AnswerFigures:
        """All answers so far."""
        with self._lock:
            return {
                "requests": dict(self._requests),
                "tokens": dict(self._tokens),
                "hits": self._hits,
                "declined": self._declined,
                "misses": dict(self._misses),
                "ttft_s": self._ttft_s.figures(),
                "load_s": self._load_s.figures(),
            }

    def ingestions(self) -> dict[str, float]:
        """All ingestions so far, summed up."""
        with self._lock:
            return dict(self._ingested)


def drift_figures(drift: DriftReport) -> dict[str, float | None]:
    """A drift report as JSON has it: no NaN."""
    return {name: None if math.isnan(value) else value for name, value in drift._asdict().items()}


def tiers_of(backend: StorageBackend) -> dict[str, TierFigures]:
    """What each tier holds, counted now; empty when the medium does not answer."""
    try:
        stats = backend.stats()
    except OSError as error:
        logger.debug("what is stored could not be counted: %s", error)
        return {}
    name = type(backend).__name__.removesuffix("Backend").lower()
    return {name: _tier_figures(held) for name, held in (stats.tiers or {name: stats}).items()}


def _tier_figures(held: StorageStats) -> TierFigures:
    return {
        "entries": held.entries,
        "bytes": held.bytes,
        "quota_bytes": held.quota_bytes,
        "counts": dict(held.counts),
    }


def _log(stats: GenerationStats, new_tokens: int) -> None:
    figures = {**asdict(stats), "generated_tokens": new_tokens}  # never the text: a log is read by more people
    requests_logger.info(
        "answered (%s): of %d prompt tokens %d reused, %d recomputed, %d fresh; %d generated; first token after %.3f s",
        stats.mode,
        stats.prompt_tokens,
        stats.prefix_tokens + stats.reused_tokens,
        stats.recomputed_tokens,
        stats.fresh_tokens,
        new_tokens,
        stats.ttft_s,
        extra={"rag_blend": figures},
    )
