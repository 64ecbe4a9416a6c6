"""Chunks primed with what stands in front of them in their document, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from conftest import random_text

from rag_blend import BlendEngine

MakeEngine = Callable[..., BlendEngine]
PRIMING = {"prime": "preceding", "prime_tokens": 64}


def test_ingested_once_and_found_by_all_that_prime_so(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    engine = make_engine(storage=tmp_path, **PRIMING)
    assert engine.ingest(texts, doc_ids=["doc"] * 6, progress=False).chunks == 6
    assert engine.ingest(texts, doc_ids=["doc"] * 6, progress=False).chunks == 0
    prompt = "\n\n".join([*reversed(texts), "where?"])
    for other in (engine, make_engine(storage=tmp_path, **PRIMING)):
        assert other.prefill(prompt).stats.hits == 6
    for options in ({"prime": "none"}, {**PRIMING, "prime_tokens": 63}):
        assert make_engine(storage=tmp_path, **options).num_chunks == 0
    # The first chunk of a document has nothing in front of it: it is primed as by "sample".
    assert make_engine(storage=tmp_path, prime="sample", prime_tokens=64).num_chunks == 1


def test_it_goes_with_its_document(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    engine = make_engine(storage=tmp_path, **PRIMING)
    engine.ingest(texts, doc_ids=["a", "a", "a", "b", "b", ""], progress=False)
    assert engine.forget(["a"]).entries == 3
    assert engine.num_chunks == 3
    assert engine.forget(["b"]).entries == 2


def test_it_is_preferred_to_what_is_primed_with_a_sample(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    prompt = "\n\n".join([*texts, "where?"])
    logits = []
    for first in ("preceding", "sample"):
        storage = tmp_path / first
        make_engine(storage=storage, prime=first, prime_tokens=64).ingest(texts, doc_ids=["doc"] * 6, progress=False)
        engine = make_engine(storage=storage, selector="none", **PRIMING)  # may use both
        engine.ingest(texts, doc_ids=["doc"] * 6, progress=False)
        logits.append(engine.prefill(prompt).logits)
    assert engine.num_chunks > 6
    torch.testing.assert_close(*logits)


def test_the_same_text_behind_another_text_is_another_chunk(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(**PRIMING)
    a, b, c = texts[:3]
    assert engine.ingest([a, c, b, c], doc_ids=["x", "x", "y", "y"], progress=False).chunks == 4
    assert engine.prefill(f"{c}\n\nwhere?").stats.hits == 1


def test_in_the_documents_own_order_it_is_closer_than_unprimed(make_engine: MakeEngine) -> None:
    texts = [random_text(seed, 40) for seed in range(4)]
    prompt = "\n\n".join([*texts, "where?"])
    gaps = []
    for options in ({"prime": "preceding", "prime_tokens": 400}, {"prime": "none"}):
        engine = make_engine(selector="none", **options)
        engine.ingest(texts, doc_ids=["doc"] * 4, progress=False)
        full, blended = engine.prefill(prompt, reuse=False), engine.prefill(prompt)
        assert blended.stats.hits == 4
        gaps.append(float((torch.log_softmax(full.logits, -1) - torch.log_softmax(blended.logits, -1)).abs().mean()))
    assert gaps[0] < 0.7 * gaps[1]
