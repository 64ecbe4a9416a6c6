"""Metrics against the stats of the very answers they sum up."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS, random_text
from test_engine_storage import prompt_with

from rag_blend import BlendEngine, Generation, GenerationStats
from rag_blend.metrics import Histogram, MetricsRecorder
from rag_blend.storage import open_storage

MakeEngine = Callable[..., BlendEngine]


def ask_all_ways(engine: BlendEngine, texts: list[str]) -> list[Generation]:
    """Blended, in full, streamed, in a batch."""
    answers = [engine.generate(prompt_with(*texts[:2]), 3), engine.generate("the river", 2)]
    stream = engine.stream(prompt_with(texts[2]), 4)
    list(stream)
    assert stream.result is not None
    return [*answers, stream.result, *engine.generate_batch([prompt_with(t) for t in texts[3:5]], 2)]


def test_metrics_sum_up_the_stats_of_all_answers(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    report = engine.ingest(texts, progress=False)
    answers = ask_all_ways(engine, texts)
    stats = [answer.stats for answer in answers]
    metrics = engine.metrics()
    assert metrics["requests"] == {mode: [s.mode for s in stats].count(mode) for mode in ("blend", "prefix", "full")}
    assert metrics["requests"]["blend"] and metrics["requests"]["full"]
    assert metrics["tokens"] == {
        "prefix": sum(s.prefix_tokens for s in stats),
        "reused": sum(s.reused_tokens for s in stats),
        "recomputed": sum(s.recomputed_tokens for s in stats),
        "fresh": sum(s.fresh_tokens for s in stats),
        "generated": sum(len(answer.token_ids) for answer in answers),
    }
    assert metrics["hits"] == sum(s.hits for s in stats) > 0
    assert metrics["declined"] == sum(s.declined for s in stats)
    assert metrics["ttft_s"]["count"] == metrics["load_s"]["count"] == len(stats)
    assert metrics["ttft_s"]["sum"] == pytest.approx(sum(s.ttft_s for s in stats))
    assert metrics["load_s"]["sum"] == pytest.approx(sum(s.load_s for s in stats))
    assert metrics["ingested"]["chunks"] == metrics["chunks"] == report.chunks == len(texts)
    assert (metrics["ingested"]["tokens"], metrics["ingested"]["bytes"]) == (report.tokens, report.bytes)
    assert metrics["storage"]["memory"]["entries"] == len(texts)


def test_a_snapshot_goes_through_json_unchanged(make_engine: MakeEngine) -> None:
    metrics = make_engine().metrics()
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["drift"]["mean_kl"] is None


def test_prefills_that_no_answer_follows_are_no_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.prefill("the river")
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Exception, match="cancelled"):
        engine.generate("the river", 2, cancel=cancel)
    assert not any(engine.metrics()["requests"].values())


def test_ingestions_add_up(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    reports = [engine.ingest(texts[:2], progress=False), engine.ingest(texts, progress=False)]
    ingested = engine.metrics()["ingested"]
    assert ingested["skipped"] == 2
    for name in ("chunks", "tokens", "bytes", "seconds"):
        assert ingested[name] == pytest.approx(sum(getattr(report, name) for report in reports))


def test_misses_are_told_apart(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts[:2], head="a head of its own\n", progress=False)
    engine.ingest(texts[2:4], progress=False)
    engine._backend.delete(engine._catalog.keys_in(engine.tokenizer(texts[2])["input_ids"]).pop())
    answer = engine.generate(prompt_with(*texts[:4]), 2)
    assert (answer.stats.hits, answer.stats.misses, answer.stats.misses_elsewhere) == (1, 3, 2)
    metrics = engine.metrics()
    assert metrics["misses"] == {"lost": 1, "other_head": 2}
    assert metrics["faults"] == {"missing": 1, "corrupt": 0, "foreign": 0, "unavailable": 0}


def test_declined_chunks_are_no_misses() -> None:
    recorder = MetricsRecorder()
    recorder.answered(Generation("", [], GenerationStats(declined=2)))
    figures = recorder.answers()
    assert (figures["declined"], figures["misses"]) == (2, {"lost": 0, "other_head": 0})


def test_each_tier_has_its_own_figures(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    engine = make_engine(storage=["memory://?quota=150KB", tmp_path])
    engine.ingest(texts, progress=False)
    memory, disk = (engine.metrics()["storage"][name] for name in ("memory", "disk"))
    assert disk["entries"] == len(texts)
    assert disk["bytes"] == sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert memory["quota_bytes"] == 150_000 >= memory["bytes"]
    assert memory["counts"]["evicted"] == len(texts) - memory["entries"] > 0


def test_what_is_stored_is_counted_only_when_asked_for(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine._backend, "stats", lambda: pytest.fail("listed"))
    assert engine.metrics(storage=False)["storage"] == {}


def test_a_medium_that_does_not_answer_costs_its_figures_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_storage(None)
    engine = make_engine(storage=backend)
    engine.generate("the river", 2)

    def down() -> Any:
        raise OSError("down")

    monkeypatch.setattr(backend, "stats", down)
    metrics = engine.metrics()
    assert metrics["storage"] == {}
    assert metrics["requests"]["full"] == 1


def test_who_waits_is_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine._lock:
        threads = [threading.Thread(target=engine.generate, args=("the river", 2)) for _ in range(3)]
        for thread in threads:
            thread.start()
        while engine.metrics()["waiting"]["requests"] < 3:  # the test's timeout ends it
            pass
        engine.ingest_later([random_text(1), random_text(2)])
        assert engine.metrics()["waiting"]["texts"] == 2
    for thread in threads:
        thread.join()
    engine.wait_for_ingestion()
    assert engine.metrics()["waiting"] == {"requests": 0, "texts": 0}


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.add(value)
    figures = histogram.figures()
    assert figures == {"bounds": [0.1, 1.0], "counts": [2, 3], "count": 4, "sum": pytest.approx(7.65)}


def test_every_answer_is_one_record_of_figures(
    make_engine: MakeEngine, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.ingest(texts, progress=False)
    with caplog.at_level(logging.INFO, "rag_blend.requests"):
        answers = ask_all_ways(engine, texts)
    records = [record for record in caplog.records if record.name == "rag_blend.requests"]
    figures = [record.__dict__["rag_blend"] for record in records]
    assert [f["ttft_s"] for f in figures] == [answer.stats.ttft_s for answer in answers]
    assert [f["generated_tokens"] for f in figures] == [len(answer.token_ids) for answer in answers]
    assert json.loads(json.dumps(figures)) == figures


def test_no_log_has_words_of_prompts_or_answers(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    secrets = ["Zweigniederlassung", "Wolfenbüttel", "Quarkspeise"]
    assert not set(secrets) & set(WORDS)
    engine = make_engine(storage=tmp_path)
    with caplog.at_level(logging.DEBUG, "rag_blend"):
        chunk = f"{random_text(1)} {secrets[0]}"
        engine.ingest([chunk], doc_ids=[secrets[1]], progress=False)
        next(tmp_path.rglob("*.safetensors")).write_bytes(b"damaged")
        engine.generate(f"{chunk} {secrets[2]}", 4)
        engine.forget([secrets[1]])
    assert len(caplog.records) > 1
    for record in caplog.records:
        written = record.getMessage() + str(record.__dict__)
        assert not [secret for secret in secrets if secret in written]
