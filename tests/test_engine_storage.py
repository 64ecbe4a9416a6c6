"""Engines on a store that others use, damage and erase."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_model, random_text

from rag_blend import BlendEngine

MakeEngine = Callable[..., BlendEngine]
HEAD = "<|im_start|>user\nAnswer the question from the water and light of the valley below.\n"
OWN_PRIME = random_text(50, 30)
DOCUMENTS = [f"doc {i}" for i in range(6)]


def prompt_with(*chunks: str, head: str = HEAD) -> str:
    return head + "\n\n".join(chunks) + "\n\nwhich river?<|im_end|>\n"


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("??/*.safetensors"))


def records(directory: Path) -> list[Path]:
    return sorted((directory / "records").glob("*.json"))


class TestErasureOfTheSample:
    @pytest.mark.parametrize(
        "other",
        [{"prime": "none"}, {"prime": OWN_PRIME}, {"prime_tokens": 24}, {"prime_tokens": 0}, {"model": 1}],
        ids=["unprimed", "own text", "other length", "no length", "other model"],
    )
    def test_any_engine_of_the_tenant_erases_it(
        self, other: dict[str, object], make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        """Wherever the sample came from, nothing of the document may stay."""
        sampling = make_engine(storage=tmp_path, prime="sample", prime_tokens=16)
        sampling.ingest(texts, doc_ids=DOCUMENTS, progress=False)
        if "model" in other:
            other = {"model": random_model(seed=1)}
        engine = make_engine(storage=tmp_path, **{"prime": "sample", **other})
        assert records(tmp_path)
        reports = [engine.forget([document]) for document in DOCUMENTS]
        assert [r.prime_renewed for r in reports].count(True) == 1
        assert records(tmp_path) == []
        assert entries(tmp_path) == []

    def test_only_what_was_primed_with_it_goes(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        sampling = make_engine(storage=tmp_path, prime="sample", prime_tokens=16)
        own = make_engine(storage=tmp_path, prime=OWN_PRIME)
        plain = make_engine(storage=tmp_path)
        tenant = make_engine(storage=tmp_path, prime="sample", prime_tokens=16, namespace="other")
        for engine in (sampling, own, plain, tenant):
            engine.ingest(texts, progress=False, doc_ids=[f"{id(engine)} {i}" for i in range(6)])
        reports = [sampling.forget([f"{id(sampling)} {i}"]) for i in range(6)]
        assert any(r.prime_renewed for r in reports)
        assert len(entries(tmp_path)) == 3 * 6
        for engine in (own, plain, tenant):
            engine.refresh()
            assert engine.num_chunks == 6
        assert len(records(tmp_path)) == 1  # the other tenant's

    def test_a_process_that_was_there_before_does_not_go_on_with_it(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        options = {"storage": tmp_path, "prime": "sample", "prime_tokens": 16}
        first, second = make_engine(**options), make_engine(**options)
        first.ingest(texts, doc_ids=DOCUMENTS, progress=False)
        second.ingest(texts, doc_ids=DOCUMENTS, progress=False)
        first.forget(DOCUMENTS)
        assert entries(tmp_path) == []
        assert second.ingest(texts[:1], doc_ids=["doc 0"], progress=False).chunks == 1
        fresh = make_engine(**options)  # knows only what is recorded
        assert fresh.num_chunks == 1
        second.refresh()
        assert second.num_chunks == 1

    def test_forget_can_be_repeated_after_a_failure(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(storage=tmp_path, prime="sample", prime_tokens=16)
        engine.ingest(texts, doc_ids=DOCUMENTS, progress=False)
        for step in ("delete", "unlink", "delete_record"):
            with monkeypatch.context() as patch:

                def fail(*_: object) -> None:
                    raise OSError("database or disk is full")

                patch.setattr(engine._backend, step, fail)
                with pytest.raises(OSError):
                    engine.forget(DOCUMENTS)
            if step != "delete":
                assert entries(tmp_path) == []
        assert engine.forget(DOCUMENTS).prime_renewed
        assert records(tmp_path) == []
        assert engine.num_chunks == 0
        assert not engine.forget(DOCUMENTS).prime_renewed


class TestLostEntries:
    @pytest.mark.parametrize("how", ["deleted", "empty", "truncated", "fifo", "directory"])
    def test_they_are_missed_once(self, how: str, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        make_engine(storage=tmp_path).ingest(texts, progress=False)
        engine = make_engine(storage=tmp_path)
        for path in entries(tmp_path):
            if how in {"deleted", "fifo", "directory"}:
                path.unlink()
            if how == "fifo":
                os.mkfifo(path)
            elif how == "directory":
                path.mkdir()
            elif how != "deleted":
                os.truncate(path, 0 if how == "empty" else 500)
        prompt = prompt_with(*texts[:4], texts[1])
        stats = engine.prefill(prompt).stats
        assert (stats.mode, stats.hits, stats.misses) == ("full", 0, 4)
        assert engine.num_chunks == 2
        counts = engine.counts()
        for _ in range(2):
            stats = engine.prefill(prompt).stats
            assert (stats.hits, stats.misses) == (0, 0)
        assert engine.counts() == counts
        assert sum(counts.values()) == 4
        assert engine.ingest(texts, progress=False).chunks == 6
        assert engine.prefill(prompt).stats.hits == 4

    def test_some_of_them(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        make_engine(storage=tmp_path).ingest(texts, progress=False)
        engine = make_engine(storage=tmp_path)
        for path in entries(tmp_path)[:2]:
            path.unlink()
        stats = engine.prefill(prompt_with(*texts)).stats
        assert (stats.hits, stats.misses) == (4, 2)
        stats = engine.prefill(prompt_with(*texts)).stats
        assert (stats.hits, stats.misses) == (4, 0)

    def test_after_a_prompt_that_used_them(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        assert engine.prefill(prompt_with(*texts)).stats.hits == 6
        shutil.rmtree(tmp_path)
        assert engine.prefill(prompt_with(*texts)).stats.misses == 6
        assert engine.prefill(prompt_with(*texts)).stats.misses == 0
        assert engine.num_chunks == 0


class TestTroubleWithTheDirectory:
    def test_it_was_removed(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        directory = tmp_path / "deep" / "kv"
        options = {"storage": directory, "prime": "sample", "prime_tokens": 16, "exact_first": False}
        engine = make_engine(**options)
        for _ in range(2):
            assert engine.ingest(texts, head=HEAD, doc_ids=DOCUMENTS, progress=False).chunks == 6
            assert engine.prefill(prompt_with(*texts[:3])).stats.hits == 4
            shutil.rmtree(tmp_path / "deep")
            assert engine.prefill(prompt_with(*texts[:3])).stats.hits == 0
        assert engine.forget(DOCUMENTS).entries == 0
        other = make_engine(**options)
        other.ingest(texts, head=HEAD, doc_ids=DOCUMENTS, progress=False)
        engine.ingest(texts[:1], head=HEAD, doc_ids=["again"], progress=False)
        assert engine.forget(["again", *DOCUMENTS]).entries == 6

    def test_the_table_of_documents_is_garbage(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts[:3], doc_ids=DOCUMENTS[:3], progress=False)
        (tmp_path / "documents.sqlite").write_bytes(b"garbage" * 1000)
        engine.ingest(texts[3:], doc_ids=DOCUMENTS[3:], progress=False)
        assert caplog.text.count("cannot be forgotten by id") == 1
        assert engine.forget(DOCUMENTS).entries == 3
        engine.ingest(texts, doc_ids=DOCUMENTS, progress=False)
        assert engine.forget(DOCUMENTS).entries == 6

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_something_else_lies_where_records_should(
        self, make: Callable[[Path], None], make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        options = {"storage": tmp_path, "prime": "sample", "prime_tokens": 16}
        make_engine(**options).ingest(texts, head=HEAD, progress=False)
        assert len(records(tmp_path)) == 2
        for path in records(tmp_path):
            path.unlink()
            make(path)
        engine = make_engine(**options)
        engine.ingest(texts, head=HEAD, progress=False)
        assert engine.prefill(prompt_with(*texts[:3])).stats.hits == 4
        assert all(path.is_file() for path in records(tmp_path))

    def test_heads_that_are_unknown_are_named(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        heads = [HEAD, HEAD + HEAD]
        engine = make_engine(storage=tmp_path)
        for head in heads:
            engine.ingest(texts, head=head, progress=False)
        for record, data in zip(records(tmp_path), (b"[1, 2", b"[3]"), strict=True):
            record.write_bytes(data)
        caplog.clear()
        engine = make_engine(storage=tmp_path)
        warnings = [
            r.message for r in caplog.records if r.levelno == logging.WARNING and "calibration" not in r.message
        ]
        assert len(warnings) == 2 and all("ingest again" in w for w in warnings)
        for head in heads:
            engine.ingest(texts, head=head, progress=False)
            assert engine.prefill(prompt_with(*texts[:3], head=head)).stats.hits >= 4
        caplog.clear()
        engine.refresh()
        assert caplog.text == "" and engine.num_chunks == 14

    def test_opening_a_damaged_store_is_one_line(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_engine(storage=tmp_path).ingest(texts, progress=False)
        for path in entries(tmp_path):
            path.write_bytes(b"?")
        caplog.clear()
        assert make_engine(storage=tmp_path).num_chunks == 0
        assert [r.levelname for r in caplog.records if "calibration" not in r.message] == ["WARNING"]
        assert "6 stored" in caplog.text


class TestRefresh:
    def test_while_another_thread_ingests(self, make_engine: MakeEngine, texts: list[str]) -> None:
        """What is ingested meanwhile must not go to a catalog that nobody uses any more."""
        engine = make_engine()
        catalog = engine._catalog
        engine.ingest(texts, progress=False)
        engine.refresh()
        assert engine._catalog is catalog and engine.num_chunks == 6
