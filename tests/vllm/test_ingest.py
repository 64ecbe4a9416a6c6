"""Chunks ingested by vLLM: what is stored is what the Hugging Face engine stores, and each finds the other's.

The server's forwards are of 96 tokens at most, so contexts and chunks are prefilled in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import random_text

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")

from vllm_server import CLOSE, HEAD, Server, assert_stores_alike, fields_of, full, ids_of, keys_in, prompt_of, refreshed

from rag_blend import BlendEngine
from rag_blend.ingest import IngestReport
from rag_blend.vllm.ingest import ingest

pytest_plugins = ["serving_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
_fresh_seeds = count(1000)
Configure = Callable[..., None]


@pytest.fixture
def configure(server: Server, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Change what the connector is told about stored chunks; workers that compute rows need none of it."""

    def change(**options: Any) -> None:
        given = server.llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        for name, value in options.items():
            monkeypatch.setitem(given, name, value)

    return change


def fresh_texts(number: int = 2, num_words: int = 60) -> list[str]:
    """Texts that no other test has."""
    return [random_text(next(_fresh_seeds), num_words) for _ in range(number)]


def ingested(server: Server, texts: list[str], **arguments: Any) -> IngestReport:
    return ingest(server.llm, texts, HEAD, progress=False, **arguments)


@pytest.mark.parametrize("prime", ["none", "sample", "preceding", "what stands in front of every chunk here"])
def test_chunks_are_those_of_the_hugging_face_engine(
    server: Server, make_hf: Callable[..., BlendEngine], configure: Configure, tmp_path: Path, prime: str
) -> None:
    texts = [*fresh_texts(14), random_text(0, 120)]  # enough for a sample
    documents = [str(number // 3) for number in range(len(texts))]
    configure(storage=str(tmp_path / "vllm"), prime=prime, prime_tokens=40, prime_texts=2)
    report = ingested(server, texts, doc_ids=documents)
    engine = make_hf(storage=tmp_path / "hf", prime=prime, prime_tokens=40, prime_texts=2)
    reference = engine.ingest(texts, HEAD, documents, progress=False)
    assert (report.chunks, report.tokens, report.bytes) == (reference.chunks, reference.tokens, reference.bytes)
    assert report.chunks == len(texts)
    assert_stores_alike(tmp_path / "vllm", tmp_path / "hf", CLOSE)


def test_what_vllm_stored_is_a_hit_for_the_hugging_face_engine_and_for_vllm(
    clean: Server, hf: BlendEngine, corpus: list[str]
) -> None:
    new = fresh_texts()
    assert ingested(clean, new).chunks == len(new)
    hf.refresh()
    assert hf.ingest(new, HEAD, progress=False).skipped == len(new)
    ids = ids_of(hf, prompt_of([corpus[0], *new]))
    reference = hf.prefill(ids, selector="heads")
    assert reference.stats.hits == 4 and reference.stats.misses == 0  # the head is one
    refreshed(clean, ids)
    answer = clean.ask_one(ids, fields_of())
    assert answer.far_from(reference.logits) < CLOSE
    assert answer.report["rag_blend"]["reused_tokens"] == reference.stats.reused_tokens + reference.stats.prefix_tokens


def test_what_the_hugging_face_engine_stored_is_not_computed_again(
    server: Server, hf: BlendEngine, monkeypatch: pytest.MonkeyPatch, corpus: list[str]
) -> None:
    asked = Mock(wraps=server.llm.collective_rpc)
    monkeypatch.setattr(server.llm, "collective_rpc", asked)
    assert ingested(server, corpus).skipped == len(corpus)
    assert not prefills(asked)


def test_what_another_dtype_computed_is_another_cache(
    server: Server, make_hf: Callable[..., BlendEngine], configure: Configure, tmp_path: Path
) -> None:
    texts = fresh_texts()
    configure(storage=str(tmp_path))
    half = make_hf(storage=tmp_path, dtype=torch.bfloat16)
    half.ingest(texts, HEAD, progress=False)
    before = keys_in(tmp_path)
    assert ingested(server, texts).chunks == len(texts)
    assert len(keys_in(tmp_path) - before) == len(texts) + 1
    half.refresh()
    assert half.num_chunks == len(texts) + 1


def test_an_interrupted_ingestion_goes_on_where_it_was(
    server: Server, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(storage=str(tmp_path))
    monkeypatch.setattr("rag_blend.ingest._BATCH_TOKENS", 1)
    texts, compute = fresh_texts(4), Mock(wraps=server.llm.collective_rpc)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if prefills(compute) == 3:
            raise KeyboardInterrupt
        return compute(*args, **kwargs)

    monkeypatch.setattr(server.llm, "collective_rpc", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ingested(server, texts)
    assert len(keys_in(tmp_path)) == 3
    compute.reset_mock()
    monkeypatch.setattr(server.llm, "collective_rpc", compute)
    ingested(server, texts)
    assert len(keys_in(tmp_path)) == len(texts) + 1, "the head is one"
    assert prefills(compute) == 2


def prefills(asked: Mock) -> int:
    return sum(call.args[0] == "prefill_rows" for call in asked.call_args_list)


def test_what_a_worker_does_not_deliver_is_not_stored(
    server: Server, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(storage=str(tmp_path))
    monkeypatch.setattr(server.llm, "collective_rpc", lambda *args, **kwargs: [])
    with pytest.raises(RuntimeError, match="KV heads"):
        ingested(server, fresh_texts())
    assert not keys_in(tmp_path)


def test_neither_answers_nor_chunks_suffer_from_each_other(
    clean: Server, hf: BlendEngine, configure: Configure, make_hf: Callable[..., BlendEngine], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, corpus: list[str],
) -> None:  # fmt: skip
    """Requests between the chunks, by the same thread, so many that they have every block; and again behind them."""
    prompts = [ids_of(hf, prompt_of([*corpus, *corpus][start : start + 3])) for start in range(8)]
    new, compute, rounds = fresh_texts(3), clean.llm.collective_rpc, count()

    def ask_and_compute(*args: Any, **kwargs: Any) -> Any:
        salt = {"cache_salt": str(next(rounds))}
        clean.ask([(ids, salt) for ids in prompts], num_tokens=1)
        return compute(*args, **kwargs)

    configure(storage=str(tmp_path / "vllm"))
    with monkeypatch.context() as patch:
        patch.setattr(clean.llm, "collective_rpc", ask_and_compute)
        ingested(clean, new)
    make_hf(storage=tmp_path / "hf").ingest(new, HEAD, progress=False)
    assert_stores_alike(tmp_path / "vllm", tmp_path / "hf", CLOSE)
    last = {"cache_salt": str(next(rounds) - 1)}
    answers = [clean.ask_one(ids, last) for ids in reversed(prompts)]
    assert answers[0].cached == 0, "what vLLM remembers of the last round is overwritten"
    for ids, answer in zip(reversed(prompts), answers, strict=True):
        assert answer.far_from(full(hf, ids)) < CLOSE


@contextmanager
def under_way(server: Server, ids: list[int], max_tokens: int) -> Iterator[None]:
    """A request that has been added and not answered; at the end it is."""
    from vllm import SamplingParams

    engine = server.llm.llm_engine
    engine.add_request("under way", {"prompt_token_ids": ids}, SamplingParams(max_tokens=max_tokens))
    try:
        yield
    finally:
        while engine.has_unfinished_requests():
            engine.step()


def test_what_a_sleep_has_emptied_is_not_taken_for_computed(
    server: Server, configure: Configure, make_hf: Callable[..., BlendEngine], tmp_path: Path
) -> None:
    """vLLM forgets its cache when it sleeps, and says nothing to a worker of ours."""
    configure(storage=str(tmp_path / "vllm"))
    new = fresh_texts(3)
    ingested(server, new[:1])
    ingested(server, new[1:2])  # the head is stored by now, so what was computed last is a chunk behind it
    server.llm.collective_rpc(lambda worker: [cache.zero_() for cache in worker.model_runner.kv_caches])
    ingested(server, new[2:])
    make_hf(storage=tmp_path / "hf").ingest(new, HEAD, progress=False)
    assert_stores_alike(tmp_path / "vllm", tmp_path / "hf", CLOSE)


def test_a_request_that_waits_is_not_forgotten(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    """It has no blocks yet, so the prefix cache alone does not tell."""
    with (
        under_way(clean, ids_of(hf, prompt_of(corpus[:3])), max_tokens=1),
        pytest.raises(RuntimeError, match="has requests under way"),
    ):
        ingested(clean, fresh_texts())


def test_a_busy_vllm_is_not_disturbed(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    with under_way(clean, ids_of(hf, prompt_of(corpus[:3])), max_tokens=4):
        clean.llm.llm_engine.step()
        with pytest.raises(RuntimeError, match="under way"):
            ingested(clean, fresh_texts())


def test_tenants_are_the_connectors(clean: Server, hf: BlendEngine) -> None:
    new, head = fresh_texts(), "the winter market opens between the old stone bridge and the new glass measures\n\n"
    assert ingest(clean.llm, new, head, namespace="other", progress=False).chunks == len(new)
    ids = ids_of(hf, prompt_of(new).replace(HEAD, head))
    refreshed(clean, ids)
    said = clean.ask_one(ids, fields_of(namespace="other")).report["rag_blend"]
    assert said["reused_tokens"] > len(new) * 40
    assert clean.ask_one(ids, fields_of()).report["rag_blend"]["reused_tokens"] == 0
    with pytest.raises(ValueError, match="'unknown' is not among the connector's namespaces"):
        ingested(clean, new, namespace="unknown")


def test_a_chunk_that_is_too_long_for_vllm_is_left_out(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    report = ingested(server, fresh_texts(1, num_words=1100))
    assert (report.chunks, report.skipped) == (0, 1)
    assert "does not fit the context window of 1024" in caplog.text


def test_a_head_of_another_models_tokens_is_refused(server: Server) -> None:
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        ingest(server.llm, fresh_texts(), [1, 2, 70_000], progress=False)
