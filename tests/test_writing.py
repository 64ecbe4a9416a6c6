"""Ingestion stores what it has computed while it computes what comes next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_text

from rag_blend import BlendEngine
from rag_blend.prefiller import ChunkPrefiller
from rag_blend.store import KVStore

MakeEngine = Callable[..., BlendEngine]
HEAD = "Answer from these texts:\n\n"


def test_a_batch_is_written_while_the_next_is_computed(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write waits until another prefill has begun; the last one, for which there is none, does not."""
    monkeypatch.setattr("rag_blend.ingest._BATCH_TOKENS", 1)
    begun = threading.Semaphore(0)
    prefill, put = ChunkPrefiller.prefill, KVStore.put
    waited = []

    def prefilling(self: ChunkPrefiller, jobs: object) -> object:
        begun.release()
        return prefill(self, jobs)  # type: ignore[arg-type]

    def putting(self: KVStore, chunk: object) -> object:
        if not waited:
            begun.acquire()  # its own prefill's
        waited.append(len(waited) == len(texts) or begun.acquire(timeout=60))
        return put(self, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkPrefiller, "prefill", prefilling)
    monkeypatch.setattr(KVStore, "put", putting)
    report = make_engine(prime="none").ingest(texts, head=HEAD, progress=False)
    assert report.chunks == len(texts) and waited == [True] * (len(texts) + 1)  # the head is one, too


@pytest.mark.parametrize("batch_tokens", [1, 2048])
@pytest.mark.parametrize("failing", [0, 2, 6])
def test_what_was_written_before_a_failure_stays_and_is_known(
    make_engine: MakeEngine,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    batch_tokens: int,
) -> None:
    monkeypatch.setattr("rag_blend.ingest._BATCH_TOKENS", batch_tokens)
    put = KVStore.put
    written = []

    def putting(self: KVStore, chunk: object) -> object:
        if len(written) == failing:
            raise OSError("no space left")
        written.append(put(self, chunk))  # type: ignore[arg-type]
        return written[-1]

    engine = make_engine(storage=tmp_path, prime="none")
    with monkeypatch.context() as patch:
        patch.setattr(KVStore, "put", putting)
        with pytest.raises(OSError, match="no space left") as caught:
            engine.ingest(texts, head=HEAD, progress=False)
    assert "ingest again" in caught.value.__notes__[0]
    assert engine.num_chunks == failing == len(set(tmp_path.glob("??/*.safetensors")))
    report = engine.ingest(texts, head=HEAD, progress=False)
    assert report.chunks == len(texts) - failing  # the head is the shortest, so it comes last
    assert engine.num_chunks == len(texts) + 1


def test_progress_counts_chunks_and_not_their_copies(
    make_engine: MakeEngine, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(prime=random_text(7, 60))
    engine.ingest(texts, head=HEAD)
    total = sum(len(engine.tokenizer(text)["input_ids"]) for text in texts)
    assert f"{total}/{total}" in capsys.readouterr().err.rsplit("KV caches", 1)[1]
