"""What a retriever has found is brought nearer before the question comes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from test_engine_storage import prompt_with
from tiers import Remote

from rag_blend import BlendEngine
from rag_blend.storage.memory import MemoryBackend
from rag_blend.storage.tiered import TieredBackend

MakeEngine = Callable[..., BlendEngine]


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_question_finds_everything_near(make_engine: MakeEngine, texts: list[str]) -> None:
    remote = Remote()
    make_engine(storage=remote).ingest(texts, progress=False)
    memory = MemoryBackend()
    tiers = TieredBackend([memory, remote])
    engine = make_engine(storage=tiers)
    engine.prefetch(texts[:3])
    wait_until(lambda: len(list(memory.keys())) == 3)
    read = remote.calls["read"]
    assert engine.prefill(prompt_with(*texts[:3])).stats.hits == 3
    assert remote.calls["read"] == read
    assert tiers.stats().counts["promoted"] == 3


def test_a_query_alone_brings_them_nearer_too(make_engine: MakeEngine, texts: list[str]) -> None:
    remote, memory = Remote(), MemoryBackend()
    make_engine(storage=remote).ingest(texts, progress=False)
    tiers = TieredBackend([memory, remote])
    engine = make_engine(storage=tiers)
    first = engine.prefill(prompt_with(*texts))
    assert tiers.flush(10)
    assert len(list(memory.keys())) == 6
    opened = remote.calls["open"]
    assert torch.equal(engine.prefill(prompt_with(*texts)).logits, first.logits)
    assert remote.calls["open"] == opened


def test_a_silent_tier_does_not_hold_anybody_up(make_engine: MakeEngine, texts: list[str]) -> None:
    remote = Remote()
    make_engine(storage=remote).ingest(texts, progress=False)
    engine = make_engine(storage=TieredBackend([MemoryBackend(), remote]))
    remote.is_down = True
    started = time.monotonic()
    engine.prefetch(texts)
    assert time.monotonic() - started < 1.0
    assert engine.prefill(prompt_with(*texts)).stats.mode == "full"
    remote.is_down = False
    assert engine.prefill(prompt_with(*texts)).stats.hits == 6
