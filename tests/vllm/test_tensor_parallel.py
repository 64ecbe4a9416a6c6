"""Two ranks, each of which has one of two KV heads, in processes of their own: blends and ingestion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import random_text

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")

from vllm_server import (
    CLOSE,
    HEAD,
    Server,
    assert_stores_alike,
    counts_of,
    fields_of,
    full,
    ids_of,
    prompt_of,
    server_apart,
)

from rag_blend import BlendEngine

pytest_plugins = ["serving_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
APART = 1e-2  # what blending without recompute does to this model is more
PRIMING = {"prime": "what stands in front of every chunk", "prime_tokens": 20}
TEXTS = [random_text(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def primed_hf(make_hf: Callable[..., BlendEngine], shared: Path) -> BlendEngine:
    engine = make_hf(storage=shared, reuse_when="possible", **PRIMING)
    engine.ingest(TEXTS, HEAD, progress=False)
    return engine


@pytest.fixture(scope="module")
def two_ranks(model_dir: Path, shared: Path, primed_hf: BlendEngine) -> Iterator[Server]:
    with server_apart(model_dir, shared, ranks=2, **PRIMING) as server:
        yield server


@pytest.fixture
def prompt(two_ranks: Server, primed_hf: BlendEngine) -> list[int]:
    """Token ids; nothing is known of them but what the store has."""
    two_ranks.forget_blocks()
    return ids_of(primed_hf, prompt_of(TEXTS[::-1]))


@pytest.mark.parametrize(("selector", "ratio"), [("none", None), ("heads", None), ("heads", 0.3), ("random", 0.2)])
def test_a_blend_is_the_hugging_face_engines(
    two_ranks: Server, primed_hf: BlendEngine, prompt: list[int], selector: str, ratio: float | None
) -> None:
    reference = primed_hf.prefill(prompt, selector=selector, recompute_ratio=ratio)
    answer = two_ranks.ask_one(prompt, fields_of(selector, ratio))
    assert answer.far_from(reference.logits) < CLOSE
    assert answer.far_from(full(primed_hf, prompt)) > APART
    assert answer.report["rag_blend"] == counts_of(reference.stats)


def test_everything_recomputed_is_a_plain_prefill(two_ranks: Server, primed_hf: BlendEngine, prompt: list[int]) -> None:
    answer = two_ranks.ask_one(prompt, fields_of("all"))
    assert answer.report["rag_blend"]["recomputed_tokens"] > 100
    assert answer.far_from(full(primed_hf, prompt)) < CLOSE


def test_blends_and_plain_requests_in_one_batch_are_as_each_alone(
    two_ranks: Server, primed_hf: BlendEngine, prompt: list[int]
) -> None:
    blend = primed_hf.prefill(prompt, selector="none").logits
    blended, plain = two_ranks.ask([(prompt, fields_of("none")), (prompt, None)])
    assert blended.far_from(blend) < CLOSE
    assert plain.far_from(full(primed_hf, prompt)) < CLOSE and plain.report is None
    assert two_ranks.ask_one(prompt).far_from(full(primed_hf, prompt)) < CLOSE, "blended blocks served a plain request"


def test_a_selector_that_compares_all_heads_is_not_served(
    two_ranks: Server, primed_hf: BlendEngine, prompt: list[int]
) -> None:
    answer = two_ranks.ask_one(prompt, fields_of("hkvd"))
    assert answer.report is None
    assert answer.far_from(full(primed_hf, prompt)) < CLOSE


def test_ingested_chunks_are_those_of_the_hugging_face_engine(
    two_ranks: Server, make_hf: Callable[..., BlendEngine], shared: Path, tmp_path: Path
) -> None:
    from rag_blend.vllm.ingest import ingest

    new = [random_text(seed) for seed in (20, 21)]
    assert ingest(two_ranks.llm, new, HEAD, progress=False).chunks == len(new)
    make_hf(storage=tmp_path, **PRIMING).ingest([*TEXTS, *new], HEAD, progress=False)
    assert_stores_alike(shared, tmp_path, CLOSE)
