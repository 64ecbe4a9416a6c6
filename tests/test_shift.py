"""Rows that are not recomputed follow those of their chunk that are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import ALL_FAMILIES, FAMILY_ROPES, random_model

from rag_blend.blend import BlendPass
from rag_blend.cache import BlendCache, kv_of
from rag_blend.chunk import LayerKV
from rag_blend.match import Match
from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.plan import BlendPlan, plan_blend
from rag_blend.selectors.spread import SpreadSelector
from rag_blend.shift import ChunkShift

NUM_TOKENS = 60
FIRST, SECOND = slice(4, 24), slice(28, 52)
CASES = sorted({*FAMILY_ROPES, *((family, "default") for family in ALL_FAMILIES)})


def a_plan() -> BlendPlan:
    chunks = [Match(f"{rows}", rows.start, rows.stop - rows.start, 0, 30) for rows in (FIRST, SECOND)]
    return plan_blend(NUM_TOKENS, [], chunks)


def random_rows(adapter: ModelAdapter, seed: int) -> LayerKV:
    """Keys before RoPE."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, adapter.num_kv_heads, NUM_TOKENS, adapter.head_dim)
    return LayerKV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def at_places(adapter: ModelAdapter, layer_idx: int, rows: LayerKV, dtype: torch.dtype = torch.float32) -> LayerKV:
    keys = torch.empty_like(rows.keys)
    adapter.rotate_into(layer_idx, keys, rows.keys, adapter.rotary.angles(NUM_TOKENS, adapter.device))
    return LayerKV(keys.to(dtype), rows.values.to(dtype, copy=True))


@pytest.mark.parametrize(("family", "rope"), CASES)
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_chunk_that_moved_as_a_whole_is_moved(family: str, rope: str, layer_idx: int) -> None:
    adapter = adapter_for(random_model(family, rope, **ALL_FAMILIES.get(family, {})))
    stored, moves = random_rows(adapter, 0), random_rows(adapter, 1)
    move = LayerKV(moves.keys[:, :, :1], moves.values[:, :, :1])
    chosen = np.array([5, 6, 10, 20])  # four tokens tell, and six are taken to stand still
    moved = LayerKV(stored.keys + move.keys, stored.values + move.values)
    expected = LayerKV(stored.keys.clone(), stored.values.clone())
    for side, shift in zip(expected, move, strict=True):
        side[:, :, FIRST] += shift * 4 / 10
    rows = at_places(adapter, layer_idx, stored)
    fresh = LayerKV(*(side[:, :, chosen] for side in at_places(adapter, layer_idx, moved)))
    angles = adapter.rotary.angles(NUM_TOKENS, adapter.device)
    ChunkShift(adapter, a_plan(), angles, chosen).apply(layer_idx, rows, fresh)
    for side, wanted in zip(rows, at_places(adapter, layer_idx, expected), strict=True):
        assert torch.allclose(side, wanted, atol=1e-5)
        assert torch.equal(side[:, :, SECOND], wanted[:, :, SECOND])  # nothing tells of it


def test_each_chunk_follows_its_own() -> None:
    adapter = adapter_for(random_model())
    stored = random_rows(adapter, 0)
    rows = at_places(adapter, 0, stored)
    chosen = np.array([4, 28])
    fresh = LayerKV(*(side[:, :, chosen].clone() for side in rows))
    before = [side.clone() for side in rows]
    fresh.values[:, :, 0] += 7.0
    fresh.values[:, :, 1] -= 14.0
    ChunkShift(adapter, a_plan(), adapter.rotary.angles(NUM_TOKENS, adapter.device), chosen).apply(0, rows, fresh)
    change = rows.values - before[1]
    assert torch.allclose(change[:, :, FIRST], torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(change[:, :, SECOND], torch.tensor(-2.0), atol=1e-5)
    untouched = torch.ones(NUM_TOKENS, dtype=torch.bool)
    untouched[FIRST] = untouched[SECOND] = False
    assert not change[:, :, untouched].any()
    assert torch.allclose(rows.keys, before[0], atol=1e-5)


def test_one_token_does_not_decide_for_its_chunk() -> None:
    adapter = adapter_for(random_model())
    rows = at_places(adapter, 0, random_rows(adapter, 0))
    before, chosen = rows.values.clone(), np.array([4, 9, 14, 19])
    fresh = LayerKV(*(side[:, :, chosen].clone() for side in rows))
    fresh.values.add_(torch.tensor([1.0, 1.0, 1.0, 1000.0])[:, None])
    ChunkShift(adapter, a_plan(), adapter.rotary.angles(NUM_TOKENS, adapter.device), chosen).apply(0, rows, fresh)
    assert torch.allclose((rows.values - before)[:, :, FIRST], torch.tensor(4 / 10), atol=1e-4)


class Stored:
    def __init__(self, layers: list[LayerKV]) -> None:
        self.layers = layers

    def layer(self, layer_idx: int) -> LayerKV:
        return LayerKV(*(side.clone() for side in self.layers[layer_idx]))


def test_the_first_layer_is_left_alone_for_its_rows_depend_on_nothing_in_front_of_them() -> None:
    adapter, plan = adapter_for(random_model()), a_plan()
    stored = Stored([random_rows(adapter, seed) for seed in range(adapter.num_layers)])
    selector = SpreadSelector()
    chosen = selector.select(plan, None)
    shift = ChunkShift(adapter, plan, adapter.rotary.angles(NUM_TOKENS, adapter.device), chosen)
    blend = BlendPass(adapter, plan, chosen, stored, selector, shift=shift)
    cache = BlendCache(adapter.num_layers, placer=blend)
    with torch.no_grad(), adapter.packing(), adapter.layer_hooks(blend.before_layer, cache):
        adapter.model(torch.arange(NUM_TOKENS)[None], use_cache=True, **{adapter.cache_argument: cache})
    rest = np.setdiff1d(plan.reusable, chosen)
    for layer_idx, rows in enumerate(stored.layers):
        for side, was in zip(kv_of(cache, layer_idx), rows, strict=True):
            assert torch.equal(side[:, :, rest], was[:, :, rest]) == (layer_idx == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_moved_as_those_of_32(dtype: torch.dtype) -> None:
    adapter = adapter_for(random_model("llama", "yarn"))
    stored, chosen = random_rows(adapter, 0), np.array([5, 9, 30, 31, 32])
    fresh = random_rows(adapter, 1)
    angles = adapter.rotary.angles(NUM_TOKENS, adapter.device)
    results = []
    for asked in (torch.float32, dtype):
        rows = at_places(adapter, 0, stored, asked)
        new = LayerKV(*(side[:, :, chosen] for side in at_places(adapter, 0, fresh, asked)))
        ChunkShift(adapter, a_plan(), angles, chosen).apply(0, rows, new)
        assert rows.keys.dtype == rows.values.dtype == asked
        results.append(rows)
    for exact, rounded in zip(*results, strict=True):
        assert float((exact - rounded.float()).abs().max()) < 0.05
