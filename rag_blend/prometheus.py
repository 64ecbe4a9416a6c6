"""Engines' metrics for Prometheus: ``register(engine)``, then ``prometheus_client.start_http_server(9400)``.

A server of one's own mounts ``prometheus_client.make_asgi_app()`` instead. docs/observability.md lists the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from rag_blend.errors import install_hint
from rag_blend.metrics import HistogramFigures, Metrics, TierFigures

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('metrics')}", name=missing.name) from None

_QUEUE = {"waiting", "waiting_bytes"}  # those of a tier's counts that can fall


class MeasuredEngine(Protocol):
    """What is needed of a `BlendEngine`."""

    def metrics(self, storage: bool = True) -> Metrics:
        """See `BlendEngine.metrics`."""


class EngineCollector(Collector):
    """Turns engines' snapshots into Prometheus metrics whenever it is scraped.

    Args:
        engines: By what the label ``engine`` shall say.
        storage_every_s: See `register`.
    """

    def __init__(self, engines: Mapping[str, MeasuredEngine], storage_every_s: float = 60.0) -> None:
        self._engines = dict(engines)
        self._storage_every_s = storage_every_s
        self._storage: dict[str, dict[str, TierFigures]] = {}
        self._counted_at = float("-inf")

    def describe(self) -> Iterable[Metric]:
        """The metrics without samples: a second collector with the same names is refused."""
        return _families({})

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        now = time.monotonic()
        with_storage = now - self._counted_at >= self._storage_every_s
        snapshots = {name: engine.metrics(storage=with_storage) for name, engine in self._engines.items()}
        if with_storage:
            self._storage = {name: figures["storage"] for name, figures in snapshots.items()}
            self._counted_at = now  # last: another thread's scrape may then read them
        for name, figures in snapshots.items():
            figures["storage"] = self._storage[name]
        return _families(snapshots)


def register(
    engines: MeasuredEngine | Mapping[str, MeasuredEngine],
    registry: CollectorRegistry | None = None,
    storage_every_s: float = 60.0,
) -> EngineCollector:
    """Have engines scraped with everything else in a registry.

    Args:
        engines: An engine, labelled ``engine="default"``; or several by label, for instance one per tenant. They stay
            referenced until the collector is unregistered.
        registry: None: the process's own.
        storage_every_s: What is stored is counted at most once in so many seconds, since that means listing it: in a
            bucket, a request per thousand entries. Scrapes in between get the last figures.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        ValueError: The registry has engines already: give all of them in one call.
    """
    collector = EngineCollector(engines if isinstance(engines, Mapping) else {"default": engines}, storage_every_s)
    (REGISTRY if registry is None else registry).register(collector)
    return collector


Rows = Iterable[tuple[tuple[str, ...], float]]  # labels' values, and the sample's


class _Numbers(NamedTuple):
    """A counter or gauge: its name without prefix, help, labels, and its samples in a snapshot."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Callable[[Metrics], Rows]


def _families(snapshots: Mapping[str, Metrics]) -> list[Metric]:
    families: list[Metric] = []
    for name, text, figures_of in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"rag_blend_{name}", text, labels=["engine"])
        for engine, snapshot in snapshots.items():
            figures = figures_of(snapshot)
            histogram.add_metric([engine], _buckets(figures), figures["sum"])
        families.append(histogram)
    for make, name, text, labels, rows in _NUMBERS:
        family = make(f"rag_blend_{name}", text, labels=["engine", *labels])
        for engine, snapshot in snapshots.items():
            for values, value in rows(snapshot):
                family.add_metric([engine, *values], value)
        families.append(family)
    return families


def _buckets(figures: HistogramFigures) -> list[tuple[str, float]]:
    at_most = zip(figures["bounds"], figures["counts"], strict=True)
    return [*((str(bound), count) for bound, count in at_most), ("+Inf", figures["count"])]


def _by_name(figures: Mapping[str, float]) -> Rows:
    return [((name,), value) for name, value in figures.items()]


def _one(value: float | None) -> Rows:
    return [] if value is None else [((), value)]


def _of_tiers(value_of: Callable[[TierFigures], Any]) -> Callable[[Metrics], Rows]:
    def rows(snapshot: Metrics) -> Rows:
        values = {tier: value_of(held) for tier, held in snapshot["storage"].items()}
        return _by_name({tier: value for tier, value in values.items() if value is not None})

    return rows


def _events(snapshot: Metrics) -> Rows:
    for tier, held in snapshot["storage"].items():
        for event in sorted(held["counts"].keys() - _QUEUE):
            yield (tier, event), held["counts"][event]


_HISTOGRAMS: tuple[tuple[str, str, Callable[[Metrics], HistogramFigures]], ...] = (
    ("ttft_seconds", "From the call to the first new token.", lambda m: m["ttft_s"]),
    ("load_seconds", "Reading stored rows behind the computation, and placing them.", lambda m: m["load_s"]),
)
_C, _G = CounterMetricFamily, GaugeMetricFamily
_NUMBERS = (
    _Numbers(_C, "requests", "Answered requests.", ("mode",), lambda m: _by_name(m["requests"])),
    _Numbers(_C, "tokens", "Prompt tokens by their fate; generated.", ("kind",), lambda m: _by_name(m["tokens"])),
    _Numbers(_C, "chunk_hits", "Stored chunks laid out in prompts.", (), lambda m: _one(m["hits"])),
    _Numbers(
        _C, "chunks_declined", "Stored chunks left alone: computing is as fast.", (), lambda m: _one(m["declined"])
    ),
    _Numbers(_C, "chunk_misses", "Stored chunks not usable there.", ("reason",), lambda m: _by_name(m["misses"])),
    _Numbers(_C, "entry_faults", "Trouble with stored entries.", ("kind",), lambda m: _by_name(m["faults"])),
    _Numbers(_C, "ingested_chunks", "Chunks computed and stored.", (), lambda m: _one(m["ingested"]["chunks"])),
    _Numbers(_C, "ingested_tokens", "Their tokens.", (), lambda m: _one(m["ingested"]["tokens"])),
    _Numbers(_C, "ingested_bytes", "What was written for them.", (), lambda m: _one(m["ingested"]["bytes"])),
    _Numbers(_C, "drift_checks", "Answers compared with full prefill.", (), lambda m: _one(m["drift"]["num_checked"])),
    _Numbers(_G, "drift_kl_nats", "Mean KL to full prefill of those.", (), lambda m: _one(m["drift"]["mean_kl"])),
    _Numbers(_G, "chunks", "Stored chunks that prompts can use.", (), lambda m: _one(m["chunks"])),
    _Numbers(_G, "waiting_requests", "Requests waiting for the model.", (), lambda m: _one(m["waiting"]["requests"])),
    _Numbers(_G, "waiting_texts", "Texts waiting to be ingested.", (), lambda m: _one(m["waiting"]["texts"])),
    _Numbers(_G, "storage_entries", "Entries in a tier.", ("tier",), _of_tiers(lambda t: t["entries"])),
    _Numbers(_G, "storage_bytes", "Their size.", ("tier",), _of_tiers(lambda t: t["bytes"])),
    _Numbers(_G, "storage_quota_bytes", "What they may take up.", ("tier",), _of_tiers(lambda t: t["quota_bytes"])),
    _Numbers(
        _G, "storage_queue_entries", "Writes that wait.", ("tier",), _of_tiers(lambda t: t["counts"].get("waiting"))
    ),
    _Numbers(
        _G, "storage_queue_bytes", "Their size.", ("tier",), _of_tiers(lambda t: t["counts"].get("waiting_bytes"))
    ),
    _Numbers(_C, "storage_events", "What happened there: evicted, failed, ...", ("tier", "event"), _events),
)
