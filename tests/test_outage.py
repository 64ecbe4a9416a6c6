"""A store that is away for a while: answered without it, and used again when it is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine_storage import prompt_with

from rag_blend import BlendEngine
from rag_blend.control import LONGEST_WAIT_S
from rag_blend.storage import EntryReader
from rag_blend.storage.base import Bytes
from rag_blend.storage.memory import MemoryBackend

MakeEngine = Callable[..., BlendEngine]


class _Reader(EntryReader):
    def __init__(self, inner: EntryReader, backend: FarAway) -> None:
        self.size = inner.size
        self._inner = inner
        self._backend = backend

    def read(self, offset: int, length: int) -> Bytes:
        self._backend.answer()
        return self._inner.read(offset, length)

    def close(self) -> None:
        self._backend.open_readers -= 1
        self._inner.close()


class FarAway(MemoryBackend):
    """Memory that is asked several things at once, and that falls silent after some answers."""

    parallel_reads = 4

    def __init__(self) -> None:
        super().__init__()
        self.answers_left: int | None = None
        self.open_readers = 0
        self.waits: list[float] = []

    def answer(self) -> None:
        if self.answers_left is not None:
            self.answers_left -= 1
            if self.answers_left < 0:
                raise TimeoutError("no answer")

    def open(self, key: str) -> EntryReader:
        self.answer()
        reader = _Reader(super().open(key), self)
        self.open_readers += 1
        return reader

    def limit_calls(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def backend() -> FarAway:
    return FarAway()


@pytest.mark.parametrize("answers", [0, 3, 11, 14])  # while opening, while reading layers
@pytest.mark.parametrize("remembered", [True, False], ids=["ids remembered", "ids unknown"])
def test_an_outage_costs_a_recompute_and_nothing_is_forgotten(
    answers: int, remembered: bool, make_engine: MakeEngine, texts: list[str], backend: FarAway
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    prompt = prompt_with(*texts)
    if remembered:
        assert engine.prefill(prompt).stats.hits == 6
    full = engine.prefill(prompt, reuse=False).logits
    backend.answers_left = answers
    cut_off = engine.prefill(prompt)
    if cut_off.stats.mode == "full":
        assert torch.equal(cut_off.logits, full)
    assert cut_off.stats.misses > 0
    assert cut_off.stats.hits + cut_off.stats.misses == 6
    assert engine.counts()["unavailable"] > 0
    assert backend.open_readers == 0
    assert engine.num_chunks == 6
    backend.answers_left = None
    again = engine.prefill(prompt).stats
    assert (again.hits, again.misses) == (6, 0)
    assert again.reused_tokens > 0


def test_a_silent_store_is_asked_once_for_each_chunk(
    make_engine: MakeEngine, texts: list[str], backend: FarAway
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    engine.prefill(prompt_with(*texts))
    backend.answers_left = 0
    assert engine.prefill(prompt_with(*texts)).stats.mode == "full"
    assert backend.answers_left == -6


def test_an_outage_is_one_warning(
    make_engine: MakeEngine, texts: list[str], backend: FarAway, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    backend.answers_left = 0
    caplog.clear()
    for _ in range(3):
        engine.prefill(prompt_with(*texts))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert engine.counts()["unavailable"] == 18


def test_the_store_is_told_how_long_it_may_take(make_engine: MakeEngine, texts: list[str], backend: FarAway) -> None:
    engine = make_engine(storage=backend)
    engine.ingest(texts, progress=False)
    backend.waits.clear()
    engine.prefill(prompt_with(*texts))
    assert backend.waits == [LONGEST_WAIT_S]  # nothing is known yet
    engine.prefill(prompt_with(*texts), reuse=False)
    engine.prefill(prompt_with(*texts))
    assert backend.waits[-1] < LONGEST_WAIT_S  # such a small model computes a prompt in no time


def test_many_reads_at_once_bring_the_same(make_engine: MakeEngine, texts: list[str], backend: FarAway) -> None:
    options: dict[str, Any] = {"selector": "none"}
    one, several = make_engine(**options), make_engine(storage=backend, **options)
    for engine in (one, several):
        engine.ingest(texts, progress=False)
    prompt = prompt_with(*texts, texts[2])
    assert torch.equal(one.prefill(prompt).logits, several.prefill(prompt).logits)
