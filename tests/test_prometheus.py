"""What a Prometheus server reads, parsed back from the very text it is given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_engine_storage import prompt_with

from rag_blend import BlendEngine
from rag_blend.prometheus import register

MakeEngine = Callable[..., BlendEngine]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(registry: CollectorRegistry) -> Samples:
    """Value by name and labels, without the label `engine`."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "engine"))): sample.value
        for family in families
        for sample in family.samples
    }


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"rag_blend_{name}", tuple(sorted(labels.items()))]


def test_a_scrape_says_what_the_snapshot_says(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(storage="memory://?quota=1GB")
    engine.ingest(texts, progress=False)
    engine.generate(prompt_with(*texts[:3]), 3)
    engine.generate("the river", 2)
    registry = CollectorRegistry()
    register(engine, registry)
    samples, metrics = scrape(registry), engine.metrics()
    for mode, count in metrics["requests"].items():
        assert one(samples, "requests_total", mode=mode) == count
    for kind, count in metrics["tokens"].items():
        assert one(samples, "tokens_total", kind=kind) == count
    assert one(samples, "tokens_total", kind="reused") > 0
    assert one(samples, "chunk_hits_total") == 3
    assert one(samples, "chunk_misses_total", reason="other_head") == 0
    assert one(samples, "entry_faults_total", kind="corrupt") == 0
    assert one(samples, "ingested_tokens_total") == metrics["ingested"]["tokens"]
    assert one(samples, "chunks") == len(texts)
    assert one(samples, "storage_bytes", tier="memory") == metrics["storage"]["memory"]["bytes"] > 0
    assert one(samples, "storage_quota_bytes", tier="memory") == 10**9
    assert one(samples, "storage_events_total", tier="memory", event="evicted") == 0
    assert one(samples, "ttft_seconds_count") == one(samples, "ttft_seconds_bucket", le="+Inf") == 2
    assert one(samples, "ttft_seconds_sum") == pytest.approx(metrics["ttft_s"]["sum"])
    buckets = [value for (name, _), value in samples.items() if name == "rag_blend_ttft_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert ("rag_blend_drift_kl_nats", ()) not in samples  # nothing was compared


def test_names_keep_to_the_conventions(make_engine: MakeEngine) -> None:
    registry = CollectorRegistry()
    register(make_engine(), registry)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("rag_blend_") and family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_kb", "_mb"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


def test_several_engines_share_the_metrics(make_engine: MakeEngine) -> None:
    engines = {"legal": make_engine(namespace="legal"), "sales": make_engine(namespace="sales")}
    engines["sales"].generate("the river", 2)
    registry = CollectorRegistry()
    register(engines, registry)
    counts = {
        engine: registry.get_sample_value("rag_blend_requests_total", {"engine": engine, "mode": "full"})
        for engine in engines
    }
    assert counts == {"legal": 0, "sales": 1}


def test_a_second_registration_is_refused_and_the_first_can_be_taken_back(make_engine: MakeEngine) -> None:
    registry = CollectorRegistry()
    collector = register(make_engine(), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        register(make_engine(), registry)
    registry.unregister(collector)
    register(make_engine(), registry)


def test_scrapes_do_not_list_the_store_each_time(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    listings: list[None] = []
    stats = engine._backend.stats
    monkeypatch.setattr(engine._backend, "stats", lambda: (listings.append(None), stats())[1])
    lazy, eager = CollectorRegistry(), CollectorRegistry()
    register(engine, lazy)
    register(engine, eager, storage_every_s=0.0)
    assert [one(scrape(lazy), "storage_entries", tier="memory") for _ in range(3)] == [0, 0, 0]
    assert len(listings) == 1
    engine.ingest(texts, progress=False)
    assert [one(scrape(eager), "storage_entries", tier="memory") for _ in range(2)] == [6, 6]
    assert len(listings) == 3
    assert one(scrape(lazy), "storage_entries", tier="memory") == 0


def test_a_missing_library_names_the_extra() -> None:
    program = "import sys; sys.modules['prometheus_client'] = None; import rag_blend.prometheus"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode and 'pip install -e ".[metrics]"' in run.stderr
