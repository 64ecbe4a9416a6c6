"""Is this model driven correctly? Checked on a short random input whenever a model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rag_blend.blend import BlendPass
from rag_blend.cache import BlendCache, kv_of
from rag_blend.chunk import LayerKV
from rag_blend.errors import UnsupportedModelError
from rag_blend.match import Match
from rag_blend.models import ModelAdapter, describe
from rag_blend.plan import BlendPlan, Positions, plan_blend
from rag_blend.rows import RowSet
from rag_blend.selectors.all import AllSelector
from rag_blend.selectors.base import TokenSelector

_NUM_TOKENS = 40
_WINDOW = 8  # where attention slides, so that it slides over such a prompt
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the largest logit
_TOLERANCE_16_BIT = 0.1


def check_model(adapter: ModelAdapter) -> None:
    """Compare three blends with what the model itself computes.

    1. Everything recomputed over worthless stored rows: equals full prefill.
    2. Every other token recomputed, the rest taken from that full prefill: equals full prefill, so the mask lets
       each token see exactly the tokens in front of it.
    3. Every layer's keys, moved to another position: equal the layer's keys computed there.

    Raises:
        UnsupportedModelError: They differ, or the model cannot be driven this way at all.
    """
    try:
        _check(adapter)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{describe(adapter.model)} cannot be blended: the self-test failed ({error})."
        ) from error


def _check(adapter: ModelAdapter) -> None:
    input_ids = random_prompt(adapter.model)
    with torch.no_grad(), adapter.sliding_over(_WINDOW):
        cache = DynamicCache()
        logits = _forward(adapter, input_ids, cache)
        layers = [kv_of(cache, i) for i in range(adapter.num_layers)]
        _check_shapes(adapter, layers)
        exact = _Rows(layers)
        worthless = _Rows([LayerKV(*(torch.full_like(side, 7.0) for side in kv)) for kv in layers])
        require_equal(adapter.model, _blend(adapter, input_ids, AllSelector(), worthless), logits, "full recompute")
        require_equal(adapter.model, _blend(adapter, input_ids, _EveryOther(), exact), logits, "partial recompute")
        _check_rotation(adapter, input_ids)


class _EveryOther(TokenSelector):
    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        return plan.reusable[::2]


class _Rows:
    """Stored rows that are simply there."""

    def __init__(self, layers: list[LayerKV]) -> None:
        self._layers = layers

    def layer(self, layer_idx: int) -> LayerKV:
        return LayerKV(*(side.clone() for side in self._layers[layer_idx]))


def _forward(adapter: ModelAdapter, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    kwargs = {adapter.cache_argument: cache}
    logits: torch.Tensor = adapter.model(input_ids=input_ids, use_cache=True, **kwargs).logits
    return logits[0, -1].float()


def _blend(adapter: ModelAdapter, input_ids: torch.Tensor, selector: TokenSelector, rows: _Rows) -> torch.Tensor:
    chunk = Match(key="", start=4, length=_NUM_TOKENS - 8, offset=0, chunk_tokens=_NUM_TOKENS - 8)
    plan = plan_blend(_NUM_TOKENS, [], [chunk])
    blend = BlendPass(adapter, plan, selector.select(plan, None), rows, selector)
    cache = BlendCache(adapter.num_layers, placer=blend)
    with adapter.packing(), adapter.layer_hooks(blend.before_layer, cache):
        return _forward(adapter, input_ids, cache)


def _check_shapes(adapter: ModelAdapter, layers: list[LayerKV]) -> None:
    expected = (1, adapter.num_kv_heads, _NUM_TOKENS, adapter.head_dim)
    for layer_idx, kv in enumerate(layers):
        for name, side in zip(kv._fields, kv, strict=True):
            if side.shape != expected:
                raise ValueError(f"{name} of layer {layer_idx} are {tuple(side.shape)} large, not {expected}")


def _check_rotation(adapter: ModelAdapter, input_ids: torch.Tensor) -> None:
    shift = 5
    angles = adapter.rotary.angles(_NUM_TOKENS, adapter.device)
    here, there = angles.at(0, _NUM_TOKENS - shift), angles.at(shift, _NUM_TOKENS)
    for layer_idx, (first, second) in enumerate(_keys_at_two_places(adapter, input_ids, shift)):
        unrotated = adapter.unrotate(layer_idx, first.keys[None], here)
        moved, added = torch.empty_like(second.keys)[None], torch.zeros_like(second.keys)[None]
        adapter.rotate_into(layer_idx, moved, unrotated, there)
        adapter.add_rotated(layer_idx, added, unrotated, there)
        for what, keys in (("moving the", moved), ("adding to the", added)):
            require_equal(adapter.model, keys[0].float(), second.keys.float(), f"{what} keys of layer {layer_idx}")


def _keys_at_two_places(adapter: ModelAdapter, input_ids: torch.Tensor, shift: int) -> list[tuple[LayerKV, LayerKV]]:
    """Each layer's fresh keys for the same hidden states at positions from 0 on and from `shift` on."""
    found: list[tuple[LayerKV, LayerKV]] = []

    def before_layer(layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        rows = hidden_states[:, : _NUM_TOKENS - shift]
        pair = []
        for start in (0, shift):
            places = torch.arange(start, start + rows.shape[1], device=rows.device)
            at_places = RowSet(adapter, _NUM_TOKENS, places).arguments(layer_idx, kwargs)
            pair.append(adapter.fresh_kv(layer_idx, rows, {**kwargs, **at_places}))
        found.append((pair[0], pair[1]))
        return hidden_states

    cache = BlendCache(adapter.num_layers)
    with adapter.layer_hooks(before_layer, cache):
        _forward(adapter, input_ids, cache)
    return found


def random_prompt(model: PreTrainedModel) -> torch.Tensor:
    """Token ids to try a model on, always the same, shape (1, num_tokens)."""
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    return torch.randint(0, embeddings.num_embeddings, (1, _NUM_TOKENS), generator=generator).to(model.device)


def require_equal(model: PreTrainedModel, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare something of ours with the model's own.

    Raises:
        UnsupportedModelError: It differs by more than rounding, or is not finite.
    """
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModelError(f"{describe(model)} cannot be blended: its own results are not finite.")
    scale = expected.abs().max().clamp_min(1e-6)
    error = float((got - expected).abs().max() / scale)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
    if not error <= tolerance:  # also when it is not a number
        raise UnsupportedModelError(
            f"{describe(model)} cannot be blended: {what} differs from the model's own result by {error:.1e} "
            f"(allowed: {tolerance:.0e})."
        )
