"""The promises that sell the project: blending is exact wherever it can be (design: promises 1 to 6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, ROPES, random_model
from exactness import HEAD, QUESTION, assert_close, blend_over_exact_rows, full_cache, full_logits, prompt_of

from rag_blend import BlendEngine
from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.rows import RowSet
from rag_blend.selectors import selector_names

EVERY_MODEL = pytest.mark.parametrize("family", FAMILIES)
EVERY_ROPE = pytest.mark.parametrize("rope", ROPES)
MakeEngine = Callable[..., BlendEngine]


@EVERY_MODEL
@EVERY_ROPE
def test_ratio_one_is_full_prefill(family: str, rope: str, make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model(family, rope)
    engine = make_engine(model=model, prime="sample", prime_tokens=16, kv_dtype=torch.float16)
    engine.ingest(texts, head=HEAD, progress=False)
    ids = prompt_of(engine, HEAD, [texts[4], texts[1], texts[3]], QUESTION)
    prefill = engine.prefill(ids, recompute_ratio=1.0)
    assert prefill.stats.hits >= 3 and prefill.stats.mode == "blend"
    assert prefill.stats.reused_tokens == prefill.stats.prefix_tokens == 0
    assert prefill.stats.recompute_ratio == 1.0
    assert_close(prefill.logits, full_logits(model, ids))


@EVERY_MODEL
def test_ratio_one_gives_the_same_greedy_text(family: str, make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model(family)
    engine = make_engine(model=model, kv_dtype=torch.float16)
    engine.ingest(texts, progress=False)
    ids = prompt_of(engine, HEAD, texts[2:5], QUESTION)
    stock = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    answer = engine.generate(ids, max_new_tokens=24, recompute_ratio=1.0, do_sample=False)
    assert answer.stats.hits == 3
    assert answer.token_ids == stock


@EVERY_MODEL
@EVERY_ROPE
def test_one_chunk_behind_its_own_head_is_exact(
    family: str, rope: str, make_engine: MakeEngine, texts: list[str]
) -> None:
    model = random_model(family, rope)
    engine = make_engine(model=model, recompute_ratio=0.0)
    engine.ingest(texts[:1], head=HEAD, progress=False)
    ids = prompt_of(engine, HEAD, texts[:1], QUESTION)
    prefill = engine.prefill(ids)
    assert prefill.stats.mode == "prefix"
    assert prefill.stats.prefix_tokens >= len(engine.tokenizer(texts[0])["input_ids"])
    assert_close(prefill.logits, full_logits(model, ids))


@EVERY_MODEL
def test_sixteen_bit_storage_stays_close(family: str, make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model(family)
    engine = make_engine(model=model, kv_dtype=None, recompute_ratio=0.0)
    engine.ingest(texts[:1], head=HEAD, progress=False)
    ids = prompt_of(engine, HEAD, texts[:1], QUESTION)
    assert_close(engine.prefill(ids).logits, full_logits(model, ids), 2e-2)


@EVERY_MODEL
@EVERY_ROPE
def test_a_moved_chunk_has_the_keys_of_its_new_place(
    family: str, rope: str, make_engine: MakeEngine, texts: list[str]
) -> None:
    """Layer 0 depends on token and position only: stored keys, moved, equal those computed in the new prompt."""
    model = random_model(family, rope)
    engine = make_engine(model=model, recompute_ratio=0.0)
    engine.ingest(texts, progress=False)
    ids = prompt_of(engine, HEAD, texts[3:5], QUESTION)
    prefill = engine.prefill(ids)
    assert prefill.stats.reused_tokens > 80
    cache = full_cache(model, ids)
    got, expected = prefill.cache.layers[0], cache.layers[0]
    assert_close(got.keys, expected.keys)
    assert_close(got.values, expected.values)
    deeper = (prefill.cache.layers[1].values - cache.layers[1].values).abs().max()
    assert deeper > 1e-3, "layer 1 must differ, or nothing was reused"


@EVERY_MODEL
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_recomputed_token_sees_a_later_one(family: str, attention: str) -> None:
    """Scattered rows over exact stored rows equal full prefill; a bottom-right triangular mask would not."""
    model = random_model(family, attn_implementation=attention)
    adapter = adapter_for(model)
    ids = torch.randint(5, 500, (1, 50), generator=torch.Generator().manual_seed(1))
    rows = [4, 9, 10, 11, 30, 44]
    logits, cache = blend_over_exact_rows(adapter, ids, rows)
    expected = full_logits(model, ids[0].tolist())
    assert_close(logits[-1], expected)
    full = full_cache(model, ids[0].tolist())
    for got, wanted in zip(cache.layers, full.layers, strict=True):
        assert_close(got.keys, wanted.keys)
        assert_close(got.values, wanted.values)


def test_the_mask_test_notices_a_bottom_right_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    def bottom_right(self: RowSet, window: int | None) -> torch.Tensor:
        rows, total = len(self), self._num_tokens
        return torch.ones(rows, total, dtype=torch.bool).tril(total - rows)[None, None]

    monkeypatch.setattr(RowSet, "mask", bottom_right)
    model = random_model()
    ids = torch.randint(5, 500, (1, 50), generator=torch.Generator().manual_seed(1))
    logits, _ = blend_over_exact_rows(ModelAdapter(model), ids, [4, 9, 10, 11, 30, 44])
    with pytest.raises(AssertionError):
        assert_close(logits[-1], full_logits(model, ids[0].tolist()))


@pytest.mark.parametrize("selector", selector_names())
def test_disk_and_memory_give_the_same_bits(
    selector: str, make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    results = []
    for storage in (None, tmp_path / "kv", tmp_path / "kv"):  # the last one finds what the second one stored
        engine = make_engine(storage=storage, selector=selector, kv_dtype=None, prime="sample", prime_tokens=16)
        engine.ingest(texts, head=HEAD, progress=False)
        prefill = engine.prefill(prompt_of(engine, HEAD, texts[1:5], QUESTION))
        assert prefill.stats.hits >= 4
        results.append(prefill.logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@EVERY_MODEL
@pytest.mark.parametrize("selector", selector_names())
def test_the_question_is_always_fresh_and_counts_add_up(
    family: str, selector: str, make_engine: MakeEngine, texts: list[str]
) -> None:
    engine = make_engine(family, selector=selector)
    engine.ingest(texts, head=HEAD, progress=False)
    ids = prompt_of(engine, HEAD, texts[1:5], QUESTION)
    stats = engine.prefill(ids).stats
    question = len(engine.tokenizer(QUESTION, add_special_tokens=False)["input_ids"])
    assert stats.prompt_tokens == len(ids)
    assert stats.fresh_tokens >= question - 1
    parts = stats.prefix_tokens + stats.reused_tokens + stats.recomputed_tokens + stats.fresh_tokens
    assert parts == len(ids)


def test_hkvd_charges_its_selection(make_engine: MakeEngine, texts: list[str]) -> None:
    """Two layers: everything in layer 0 and at the check layer, so nothing is saved, and it must say so."""
    engine = make_engine(selector="hkvd")
    engine.ingest(texts, progress=False)
    stats = engine.prefill(prompt_of(engine, HEAD, texts[1:5], QUESTION)).stats
    reusable = stats.reused_tokens + stats.recomputed_tokens
    assert stats.recomputed_tokens == -(-reusable * 15 // 100)
    assert stats.recompute_ratio == 1.0


def test_hkvd_takes_the_tokens_that_deviate_most(make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model(num_hidden_layers=3)
    engine = make_engine(model=model, selector="hkvd")
    engine.ingest(texts, progress=False)
    ids = prompt_of(engine, HEAD, texts[1:5], QUESTION)
    nothing = engine.prefill(ids, selector="none")
    blended = engine.prefill(ids)
    full = full_cache(model, ids)
    # What the definition says: squared distance of the values at layer 1. Fresh tokens are exact there: distance 0.
    deviation = (full.layers[1].values - nothing.cache.layers[1].values).pow(2).sum(dim=(0, 1, 3))
    reusable = deviation > 1e-8
    assert int(reusable.sum()) == nothing.stats.reused_tokens
    expected = set(deviation.topk(blended.stats.recomputed_tokens).indices.tolist())
    changed = (blended.cache.layers[2].values != nothing.cache.layers[2].values).any(dim=3).any(dim=1)[0]
    assert set((changed & reusable).nonzero().flatten().tolist()) == expected


def test_every_selector_at_every_ratio_runs(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, progress=False)
    ids = prompt_of(engine, HEAD, texts[:4], QUESTION)
    expected = full_logits(random_model(), ids)
    for selector in selector_names():
        for ratio in (None, 0.0, 0.07, 0.5, 1.0):
            prefill = engine.prefill(ids, selector=selector, recompute_ratio=ratio)
            assert torch.isfinite(prefill.logits).all()
            if ratio == 1.0:
                assert_close(prefill.logits, expected)


def test_head_tokens_are_the_first_of_each_chunk(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(selector="heads")
    engine.ingest(texts, progress=False)
    stats = engine.prefill(prompt_of(engine, HEAD, texts[:4], QUESTION)).stats
    assert stats.recomputed_tokens == 4 * 8


def test_beams_blend_as_well(make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model()
    engine = make_engine(model=model)
    engine.ingest(texts, progress=False)
    ids = prompt_of(engine, HEAD, texts[:4], QUESTION)
    stock = model.generate(torch.tensor([ids]), max_new_tokens=8, num_beams=3, do_sample=False)[0, len(ids) :].tolist()
    answer = engine.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, recompute_ratio=1.0)
    assert answer.token_ids == stock
