"""Ingestion in the background, and caches that are fetched in advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
from test_engine_storage import HEAD, prompt_with

from rag_blend import BlendEngine
from rag_blend.later import IdleClock, IdleIngester, PendingText
from rag_blend.storage.memory import MemoryBackend

MakeEngine = Callable[..., BlendEngine]


def pending(*texts: str, head: tuple[int, ...] | None = None) -> list[PendingText]:
    return [PendingText(text, head, "") for text in texts]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterable[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name == "rag-blend-later"] == []


class TestTheQueue:
    def test_texts_of_one_head_are_ingested_together(self) -> None:
        seen: list[list[str]] = []
        ingester = IdleIngester(lambda texts: seen.append([t.text for t in texts]), lambda: 10.0)
        gate = threading.Event()
        ingester._ingest = lambda texts: (gate.wait(5), seen.append([t.text for t in texts]))
        ingester.offer(pending("first"))
        while ingester._waiting:
            time.sleep(0.01)
        ingester.offer([*pending("a", "b", "a"), *pending("c", head=(1,)), *pending("d", head=(1,))])
        gate.set()
        assert ingester.flush(5)
        assert seen == [["first"], ["a", "b"], ["c", "d"]]
        ingester.close()

    def test_it_waits_while_the_model_is_used(self) -> None:
        seen: list[Sequence[PendingText]] = []
        idle = 0.0
        ingester = IdleIngester(seen.append, lambda: idle)
        assert ingester.offer(pending("a")) == 1
        assert not ingester.flush(0.2)
        assert seen == []
        idle = 10.0
        assert ingester.flush(5)
        assert seen == [pending("a")]
        ingester.close()

    def test_it_is_bounded(self) -> None:
        ingester = IdleIngester(lambda texts: None, lambda: 0.0, max_texts=3)
        assert ingester.offer(pending("a", "b")) == 2
        assert ingester.offer(pending("b", "c", "d", "e")) == 2
        assert [text.text for text in ingester._waiting] == ["a", "b", "c"]
        ingester.close()
        assert ingester.offer(pending("f")) == 0

    def test_a_failure_ends_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[Sequence[PendingText]] = []

        def ingest(texts: Sequence[PendingText]) -> None:
            seen.append(texts)
            raise OSError("no room")

        ingester = IdleIngester(ingest, lambda: 10.0)
        for text in ("a", "b"):
            ingester.offer(pending(text))
            assert ingester.flush(5)
        assert len(seen) == 2
        assert caplog.text.count("no room") == 2
        ingester.close()


def test_the_clock_counts_users() -> None:
    clock = IdleClock()
    with clock:
        with clock:
            assert clock.idle_s() == 0.0
        assert clock.idle_s() == 0.0
    time.sleep(0.02)
    assert clock.idle_s() >= 0.02
    clock.touch()
    assert clock.idle_s() < 0.02


class TestTheEngine:
    def test_what_was_met_once_is_reused_next_time(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        assert engine.ingest_later(texts, head=HEAD, doc_ids=[f"d{i}" for i in range(6)]) == 6
        first = engine.generate(prompt_with(*texts), max_new_tokens=2)
        assert first.stats.mode == "full"  # the question came first
        assert engine.num_chunks == 0
        assert engine.wait_for_ingestion(30)
        assert engine.prefill(prompt_with(*texts)).stats.hits == 7  # the head as well
        assert engine.forget(["d0"]).entries == 1

    def test_a_forgotten_document_is_not_cached_after_all(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest_later(texts[:3], doc_ids=["gone", "stays", "gone"])
        engine.forget(["gone"])
        assert engine.wait_for_ingestion(30)
        assert engine.num_chunks == 1

    def test_closing_drops_what_waits(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest_later(texts)
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 10
        assert engine.wait_for_ingestion(1)

    @pytest.mark.parametrize("call", ["ingest_later", "prefetch"])
    def test_a_string_is_not_a_list_of_texts(self, call: str, make_engine: MakeEngine) -> None:
        with pytest.raises(TypeError):
            getattr(make_engine(), call)("text")

    def test_the_backend_is_told_what_will_be_wanted(self, make_engine: MakeEngine, texts: list[str]) -> None:
        told: list[set[str]] = []
        asked = threading.Event()

        class Backend(MemoryBackend):
            def prefetch(self, keys: Iterable[str]) -> None:
                told.append(set(keys))
                asked.set()

        engine = make_engine(storage=Backend())
        engine.ingest(texts[:4], head=HEAD, progress=False)
        engine.prefetch([texts[1], texts[2], texts[5]])
        assert asked.wait(10)
        assert len(told[0]) == 2
