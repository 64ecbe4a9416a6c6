"""A store that hangs, as network file systems do: nobody waits long for it, and it is used again when it answers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from test_engine_storage import prompt_with

from rag_blend import BlendEngine, GenerationCancelledError
from rag_blend.patience import HangingStoreError, Patience
from rag_blend.prefetch import LayerPrefetcher
from rag_blend.storage import EntryReader
from rag_blend.storage.base import Bytes
from rag_blend.storage.memory import MemoryBackend
from rag_blend.storage.tiered import TieredBackend

MakeEngine = Callable[..., BlendEngine]
DEADLINE_S = 0.4
SLACK_S = 2.0  # a machine under test is busy


class _Reader(EntryReader):
    def __init__(self, inner: EntryReader, backend: Sleeper) -> None:
        self.size = inner.size
        self._inner = inner
        self._backend = backend

    def read(self, offset: int, length: int) -> Bytes:
        self._backend.wait()
        return self._inner.read(offset, length)

    def close(self) -> None:
        self._backend.open_readers.discard(id(self))
        self._inner.close()


class Sleeper(MemoryBackend):
    """Memory that, as a disk, may hang: after some answers each call takes until somebody wakes it."""

    has_deadlines = False

    def __init__(self) -> None:
        super().__init__()
        self.open_readers: set[int] = set()
        self.hangs = threading.Event()
        self._answers_left: int | None = None
        self._awake = threading.Event()

    def fall_asleep(self, answers: int = 0) -> None:
        self._awake.clear()
        self._answers_left = answers

    def wake(self) -> None:
        self._answers_left = None
        self._awake.set()

    def wait(self) -> None:
        if self._answers_left is None:
            return
        self._answers_left -= 1
        if self._answers_left < 0:
            self.hangs.set()
            assert self._awake.wait(30)

    def open(self, key: str) -> EntryReader:
        self.wait()
        reader = _Reader(super().open(key), self)
        self.open_readers.add(id(reader))
        return reader


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    monkeypatch.setattr("rag_blend.store.DEADLINE_S", DEADLINE_S)
    return Sleeper()


def threads() -> list[threading.Thread]:
    """Those that may be left behind."""
    names = ("rag-blend-open", "rag-blend-reader", "rag-blend-fetch", "rag-blend-stream")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# How many calls are answered first. Of six chunks whose ids are known each takes three to open, then one a layer.
WHERE = {"opening": 0, "a header": 2, "a later entry": 13, "the first layer": 18, "the last layer": 27}
HANGS = pytest.mark.parametrize("answers", WHERE.values(), ids=WHERE.keys())


@HANGS
@pytest.mark.parametrize("known", [True, False], ids=["ids known", "ids unknown"])
def test_an_answer_does_not_wait_for_it(
    answers: int, known: bool, make_engine: MakeEngine, texts: list[str], backend: Sleeper
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    prompt = prompt_with(*texts)
    full = engine.prefill(prompt, reuse=False)
    if known:
        assert engine.prefill(prompt).stats.hits == 6
    backend.fall_asleep(answers)
    started = time.monotonic()
    prefill = engine.prefill(prompt)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert torch.equal(prefill.logits, full.logits)
    assert (prefill.stats.mode, prefill.stats.misses) == ("full", 6)
    assert engine.counts()["unavailable"] >= 6
    again = engine.prefill(prompt)  # still asleep: nobody waits for it twice
    assert torch.equal(again.logits, full.logits) and len(threads()) == 1
    assert all(thread.daemon for thread in threads())  # or the process could not end
    backend.wake()
    assert eventually(lambda: not threads() and not backend.open_readers)
    stats = engine.prefill(prompt).stats
    assert (stats.hits, stats.misses) == (6, 0) and stats.reused_tokens > 0
    assert engine.num_chunks == 6


@HANGS
def test_a_cancelled_request_returns_in_time(
    answers: int, make_engine: MakeEngine, texts: list[str], backend: Sleeper
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    prompt = prompt_with(*texts)
    expected = engine.generate(prompt, 4, reuse=False).text
    assert engine.generate(prompt, 4).stats.hits == 6
    backend.fall_asleep(answers)
    cancel = threading.Event()
    canceller = threading.Thread(target=lambda: backend.hangs.wait(20) and cancel.set())
    canceller.start()
    started = time.monotonic()
    with pytest.raises(GenerationCancelledError):
        engine.generate(prompt, 4, cancel=cancel)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    canceller.join()
    answer = engine.generate(prompt, 4)
    assert answer.text == expected and answer.stats.mode == "full"
    backend.wake()
    assert eventually(lambda: not threads() and not backend.open_readers)
    gc.collect()
    assert not any(type(held) is LayerPrefetcher for held in gc.get_objects())  # nor its layers
    assert engine.generate(prompt, 4).stats.reused_tokens > 0


@HANGS
def test_a_closed_stream_returns_in_time(
    answers: int, make_engine: MakeEngine, texts: list[str], backend: Sleeper
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    prompt = prompt_with(*texts)
    engine.prefill(prompt)
    backend.fall_asleep(answers)
    stream = engine.stream(prompt, 4)
    assert backend.hangs.wait(20)
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert stream.result is None and list(stream) == []
    assert engine.generate(prompt, 4).stats.mode == "full"
    backend.wake()
    assert eventually(lambda: not threads() and not backend.open_readers)
    assert engine.generate(prompt, 4).stats.reused_tokens > 0


def test_many_cancelled_requests_leave_one_thread_behind(
    make_engine: MakeEngine, texts: list[str], backend: Sleeper
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    backend.fall_asleep()
    for _ in range(10):
        stream = engine.stream(prompt_with(*texts), 4)
        assert backend.hangs.wait(20)
        stream.close()
    assert len(threads()) == 1
    backend.wake()
    assert eventually(lambda: not threads())


def test_a_slow_store_is_waited_for(make_engine: MakeEngine, texts: list[str], backend: Sleeper) -> None:
    """Each call takes less than the deadline, all together far more."""
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    backend.wait = lambda: time.sleep(DEADLINE_S / 8)  # type: ignore[method-assign]
    started = time.monotonic()
    assert engine.prefill(prompt_with(*texts)).stats.hits == 6
    assert time.monotonic() - started > 2 * DEADLINE_S


def test_other_requests_are_answered_meanwhile(make_engine: MakeEngine, texts: list[str], backend: Sleeper) -> None:
    """The model is not held by a request that waits for the store longer than the deadline."""
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    backend.fall_asleep()
    results: list[int] = []
    askers = [
        threading.Thread(target=lambda: results.append(engine.generate(prompt_with(*texts), 2).stats.misses))
        for _ in range(4)
    ]
    started = time.monotonic()
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert results == [6] * 4
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    backend.wake()


def test_of_several_tiers_one_that_hangs_is_enough() -> None:
    assert TieredBackend([MemoryBackend(), MemoryBackend()]).has_deadlines
    assert not TieredBackend([MemoryBackend(), Sleeper()]).has_deadlines


class TestPatience:
    def test_without_a_deadline_work_is_done_at_once(self) -> None:
        here = threading.get_ident()
        assert Patience(None).run(threading.get_ident, print) == here

    def test_what_work_raises_is_raised(self) -> None:
        def fail() -> int:
            raise TimeoutError("of the medium")

        with pytest.raises(TimeoutError, match="of the medium") as caught:
            Patience(5.0).run(fail, print)
        assert not isinstance(caught.value, HangingStoreError)

    @pytest.mark.parametrize("outcome", ["result", "error"])
    def test_what_comes_too_late_is_undone(self, outcome: str) -> None:
        patience, go, undone = Patience(0.2), threading.Event(), list[str]()

        def work() -> str:
            assert go.wait(20)
            if outcome == "error":
                raise ValueError(outcome)
            return outcome

        with pytest.raises(HangingStoreError, match="has not answered for"):
            patience.run(work, undone.append)
        with pytest.raises(HangingStoreError, match="an earlier call"):
            patience.run(work, undone.append)
        go.set()
        assert eventually(lambda: not threads())
        assert undone == ([outcome] if outcome == "result" else [])
        assert patience.run(lambda: 7, print) == 7

    def test_news_are_waited_for(self) -> None:
        patience, news, future = Patience(0.3), [0], Future[str]()

        def get_on() -> None:
            for _ in range(8):
                time.sleep(0.1)
                news[0] += 1
            future.set_result("done")

        threading.Thread(target=get_on).start()
        assert patience.wait(future, lambda: news[0]) == "done"

    def test_a_result_that_is_there_is_given_though_something_else_hangs(self) -> None:
        patience, done, other = Patience(0.2), Future[int](), Future[int]()
        patience.give_up(other)
        done.set_result(3)
        assert patience.wait(done) == 3
        other.set_result(4)
        assert patience.run(lambda: 5, print) == 5
