"""Our faster arithmetic equals the models' own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, FAMILY_ROPES, random_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rag_blend.models import adapter_for, attention
from rag_blend.models.attention import AttentionFunction, FewRows, attending, packed_attention
from rag_blend.rope import Rotary
from rag_blend.transformers_prefill import TransformersPrefill


@pytest.mark.parametrize(("family", "rope"), FAMILY_ROPES)
def test_rotating_in_place_equals_the_family_s_function(family: str, rope: str) -> None:
    rotary = adapter_for(random_model(family, rope)).rotary
    keys = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0)).half()
    angles = rotary.angles(90, keys.device).at(60, 90)
    whole = torch.zeros(1, 2, 50, 16)
    rotary.rotate_into(whole[:, :, 10:40], keys, angles)
    assert rotary.rotates_halves or family not in FAMILIES  # or loading their chunks would be slower
    turned = angles.cos.shape[1]
    assert torch.equal(whole[:, :, 10:40, turned:], keys[..., turned:].float())  # partial RoPE leaves the rest alone
    assert torch.allclose(whole[:, :, 10:40], rotary.rotate(keys, angles), atol=1e-6)
    assert not whole[:, :, :10].any() and not whole[:, :, 40:].any()
    rounded = torch.zeros(1, 2, 30, 16, dtype=torch.bfloat16)
    rotary.rotate_into(rounded, keys, angles)
    assert torch.equal(rounded, whole[:, :, 10:40].bfloat16())  # once, from the same numbers
    assert torch.allclose(rotary.unrotate(whole[:, :, 10:40], angles), keys.float(), atol=1e-5)


def test_a_family_that_interleaves_is_left_to_its_own_function() -> None:
    def interleaved(q, k, cos, sin):
        turned = torch.stack((-k[..., 1::2], k[..., ::2]), dim=-1).flatten(-2)
        return q, k * cos.repeat_interleave(2, dim=-1)[..., : k.shape[-1]] + turned * sin[..., : k.shape[-1]]

    module = random_model().model.rotary_emb
    rotary = Rotary(module, interleaved)
    assert not rotary.rotates_halves
    keys = torch.randn(1, 2, 5, 16)
    angles = rotary.angles(5, keys.device)
    target = torch.empty_like(keys)
    rotary.rotate_into(target, keys, angles)
    assert torch.equal(target, rotary.rotate(keys, angles))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("attend", [packed_attention, FewRows()])
@pytest.mark.parametrize("mask_bytes", [0, 1_000_000])
def test_attention_of_few_rows_equals_that_of_transformers(
    mask_bytes: int,
    attend: AttentionFunction,
    additive: bool,
    batch: int,
    heads: int,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_MOST_ROWS_OF_A_BLOCK", 3)
    monkeypatch.setattr(attention, "_MOST_MASK_BYTES", mask_bytes)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 7, heads, 8, generator=generator).transpose(1, 2)  # as the models make it
    whole = torch.randn(2, batch, kv_heads, 60, 8, generator=generator)
    key, value = whole[0, :, :, :50], whole[1, :, :, :50]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    for rows in ([0, 3, 4, 20, 33, 48, 49], [9, 2, 1, 30, 4, 5, 40]):  # also out of order
        visible = (torch.arange(50)[None] <= torch.tensor(rows)[:, None])[None, None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min) if additive else visible
        for layer in range(2):
            ours, _ = attend(module, query, key + layer, value, mask, scaling=0.3, dropout=0.0)
            stock, _ = sdpa_attention_forward(module, query, key + layer, value, mask, scaling=0.3, dropout=0.0)
            assert ours.shape == stock.shape == (batch, 7, heads, 8)
            assert torch.allclose(ours, stock, atol=1e-6)
    ours, _ = attend(module, query, key[:, :, :7], value[:, :, :7], None, scaling=0.3, dropout=0.0)
    stock, _ = sdpa_attention_forward(module, query, key[:, :, :7], value[:, :, :7], None, scaling=0.3, dropout=0.0)
    assert torch.allclose(ours, stock, atol=1e-6)


@pytest.mark.parametrize("each_its_own", [False, True])
def test_a_batch_whose_members_see_something_else_is_told_from_one_whose_members_do_not(each_its_own: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 7, 8, generator=generator)
    mask = (torch.rand(2, 1, 7, 7, generator=generator) > 0.5) | torch.eye(7, dtype=torch.bool)
    mask = mask if each_its_own else mask[:1].expand(2, -1, -1, -1)
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    ours, _ = FewRows()(module, query, key, value, mask, scaling=0.3)
    stock, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert torch.allclose(ours, stock, atol=1e-6)


def test_ingestion_computes_a_batch_behind_a_head_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    usual = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if more.get("attn_mask") is not None:
            batches.append(len(query))
            assert query.shape[2] <= 2 * 3  # query heads of a key head, rows of a block
        return usual(query, key, *rest, **more)

    prefill = TransformersPrefill(adapter_for(random_model())).behind(np.arange(5, 25, dtype=np.int32))
    chunks = [np.arange(start, start + 12, dtype=np.int32) for start in (30, 50)]
    expected = prefill(chunks)
    monkeypatch.setattr(attention, "_MOST_ROWS_OF_A_BLOCK", 3)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    for ours, theirs in zip(prefill(chunks), expected, strict=True):
        assert all(torch.allclose(a.keys, b.keys, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert set(batches) == {2}


def test_the_model_gets_its_attention_back() -> None:
    model = random_model()
    with adapter_for(model).packing():
        assert model.config._attn_implementation == "rag_blend_packed"
    assert model.config._attn_implementation == "sdpa"
    eager = random_model(attn_implementation="eager")
    with adapter_for(eager).packing():
        assert eager.config._attn_implementation == "eager"


def test_attention_of_ours_is_this_threads_own() -> None:
    """Somebody else who runs the model meanwhile neither calls it nor gets something else than the model's results."""
    model = random_model()
    ids = torch.arange(5, 45)[None]
    called: list[threading.Thread] = []

    def watching(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        called.append(threading.current_thread())
        return packed_attention(*args, **kwargs)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits

    stock = run()
    with attending(model.config, "watching", watching), ThreadPoolExecutor(1) as other:
        assert torch.allclose(other.submit(run).result(), stock, atol=1e-5)
        assert called == []
        assert torch.allclose(run(), stock, atol=1e-5)
    assert set(called) == {threading.current_thread()} and len(called) == 2
    run()
    assert len(called) == 2
