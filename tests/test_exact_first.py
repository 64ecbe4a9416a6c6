"""Chunks that are kept twice: primed, and unprimed for where they stand first behind their head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_text

from rag_blend import BlendEngine
from rag_blend.transformers_prefill import TransformersPrefill

MakeEngine = Callable[..., BlendEngine]
HEAD = "Answer from these texts:\n\n"
PRIMING = {"prime": random_text(99, 80), "selector": "none"}


def prompt_of(*texts: str) -> str:
    return HEAD + "\n\n".join([*texts, "where?"])


def test_what_stands_first_is_exact_and_the_rest_primed(make_engine: MakeEngine, texts: list[str]) -> None:
    once, twice = (make_engine(exact_first=wanted, **PRIMING) for wanted in (False, True))
    for engine in (once, twice):
        assert engine.ingest(texts, head=HEAD, progress=False).chunks == 6
        assert engine.ingest(texts, head=HEAD, progress=False).skipped == 6
    assert twice.num_chunks == once.num_chunks and (once.num_copies, twice.num_copies) == (0, 6)
    for order in (texts, texts[::-1]):
        before, now = (engine.prefill(prompt_of(*order)).stats for engine in (once, twice))
        assert now.hits == before.hits == 7  # the head is one
        assert now.prefix_tokens > before.prefix_tokens + 30
        assert now.prefix_tokens + now.reused_tokens == before.prefix_tokens + before.reused_tokens


def test_the_rows_of_what_stands_first_are_those_of_full_prefill(make_engine: MakeEngine, texts: list[str]) -> None:
    """In all layers; behind it they are an approximation from the second layer on."""
    engine = make_engine(**PRIMING)
    engine.ingest(texts, head=HEAD, progress=False)
    blended, full = (engine.prefill(prompt_of(*texts), reuse=reuse) for reuse in (True, False))
    exact = blended.stats.prefix_tokens
    for ours, theirs in zip(blended.cache.layers, full.cache.layers, strict=True):
        for got, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(got[:, :, :exact], expected[:, :, :exact], atol=1e-5, rtol=1e-5)
    assert (ours.values - theirs.values)[:, :, exact:].abs().max() > 1e-3


def test_alone_it_is_full_prefill(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(exact_first=True, **PRIMING)
    engine.ingest(texts, head=HEAD, progress=False)
    answer = engine.prefill(prompt_of(texts[2]))
    assert answer.stats.mode == "prefix" and answer.stats.hits == 2
    full = engine.prefill(prompt_of(texts[2]), reuse=False)
    torch.testing.assert_close(answer.logits, full.logits, atol=1e-5, rtol=1e-5)


def test_where_it_does_not_stand_first_it_is_the_primed_one(make_engine: MakeEngine, texts: list[str]) -> None:
    """Bit for bit: the first text is not stored."""
    logits = []
    for wanted in (False, True):
        engine = make_engine(exact_first=wanted, **PRIMING)
        engine.ingest(texts[1:], head=HEAD, progress=False)
        logits.append(engine.prefill(prompt_of(*texts)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("batch_tokens", [1, 250, 400, 2048])
def test_both_are_one_prefill(
    make_engine: MakeEngine, texts: list[str], batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks a batch takes, and whether or not they are equally long."""
    monkeypatch.setattr("rag_blend.ingest._BATCH_TOKENS", batch_tokens)
    counts = []
    behind = TransformersPrefill.behind

    def counting(self: TransformersPrefill, context: object) -> object:
        run = behind(self, context)  # type: ignore[arg-type]

        def prefill(chunks: list[object]) -> object:
            counts[-1] += len(chunks)
            return run(chunks)  # type: ignore[arg-type]

        return prefill

    monkeypatch.setattr(TransformersPrefill, "behind", counting)
    for wanted in (False, True):
        counts.append(0)
        make_engine(exact_first=wanted, **PRIMING).ingest(texts, head=HEAD, progress=False)
    assert counts[0] == counts[1] == 1 + 2 * 6


def test_both_go_with_their_document(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    engine = make_engine(storage=tmp_path, exact_first=True, **PRIMING)
    engine.ingest(texts, doc_ids=["a", "a", "a", "b", "b", "b"], head=HEAD, progress=False)
    assert (engine.num_chunks, engine.num_copies) == (1 + 6, 6)
    assert engine.forget(["a"]).entries == 6
    assert (engine.num_chunks, engine.num_copies) == (1 + 3, 3)
    for wanted in (True, False):  # who does not want them does not see them
        other = make_engine(storage=tmp_path, exact_first=wanted, **PRIMING)
        assert (other.num_chunks, other.num_copies) == (1 + 3, 3 * wanted)


def test_without_a_known_head_there_is_nothing_to_be_first_behind(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(exact_first=True, **PRIMING)
    engine.ingest(texts, progress=False)
    assert engine.num_chunks == 6


@pytest.mark.parametrize("damaged", ["primed", "copies"])
def test_a_damaged_one_is_not_replaced_by_a_worse(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path, damaged: str
) -> None:
    """Unprimed, what stands elsewhere would be worse than the chosen policy; primed, what stands first is a blend."""
    once, twice = (make_engine(storage=tmp_path, exact_first=wanted, **PRIMING) for wanted in (False, True))
    once.ingest([], head=HEAD, progress=False)
    head = set(tmp_path.glob("??/*.safetensors"))
    once.ingest(texts, head=HEAD, progress=False)
    primed = set(tmp_path.glob("??/*.safetensors")) - head
    twice.ingest(texts, head=HEAD, progress=False)
    copies = set(tmp_path.glob("??/*.safetensors")) - head - primed
    assert len(copies) == len(primed) == 6
    for path in primed if damaged == "primed" else copies:
        path.write_bytes(path.read_bytes()[:-1])
    stats = twice.prefill(prompt_of(*texts)).stats
    assert (stats.hits, stats.misses) == ((1, 6) if damaged == "primed" else (7, 1))
    if damaged == "copies":
        assert torch.equal(twice.prefill(prompt_of(*texts)).logits, once.prefill(prompt_of(*texts)).logits)


def test_unprimed_chunks_of_others_are_not_used(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    """What stands behind other chunks is primed or computed, whatever an engine without priming has stored."""
    make_engine(storage=tmp_path, prime="none").ingest(texts, head=HEAD, progress=False)
    engine = make_engine(storage=tmp_path, **PRIMING)
    assert engine.prefill(prompt_of(*texts)).stats.hits == 1  # the head
    engine.ingest(texts[:1], head=HEAD, progress=False)
    stats = engine.prefill(prompt_of(*texts)).stats
    assert (stats.hits, stats.mode) == (2, "prefix")


def test_prefetching_brings_the_copy_of_what_will_stand_first(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**PRIMING)
    engine.ingest(texts, head=HEAD, progress=False)
    asked: list[set[str]] = []
    monkeypatch.setattr(engine._backend, "prefetch", lambda keys: asked.append(set(keys)))
    engine.prefetch(texts[:2])
    engine._fetching.shutdown()
    trace = engine.prefill(prompt_of(*texts[:2])).trace
    assert trace is not None
    _, copy, second = (chunk.key for chunk in trace.chunks if chunk.is_hit)  # the head is never fetched in advance
    (keys,) = asked
    assert {copy, second} < keys and len(keys) == 3


def test_the_rounding_of_a_codec_is_never_exact(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(codec="int8", **PRIMING)
    engine.ingest(texts, head=HEAD, progress=False)
    stats = engine.prefill(prompt_of(texts[0])).stats
    assert (stats.mode, stats.hits) == ("blend", 2)
    assert stats.prefix_tokens < 30  # the head, which is never rounded
