"""How much a model computes: for a token, and for a blend before it has begun; and how long that takes here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from rag_blend.control import ModelCost
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan
from rag_blend.selectors import AttentionSelector, TokenSelector
from rag_blend.selectors.base import probe_rows, share_of

_TRIED_TOKENS = (64, 256)
_LONGEST_TRY_S = 1.0


def cost_of(adapter: ModelAdapter) -> ModelCost:
    """What a model computes, from the sizes of its decoder layers; experts count as if all were used."""
    weights = sum(parameter.numel() for parameter in adapter.layers.parameters())
    per_pair = 4 * adapter.num_layers * adapter.config.num_attention_heads * adapter.head_dim
    return ModelCost(2.0 * weights, float(per_pair), adapter.num_layers)


def expected_rows(
    plan: BlendPlan, selector: TokenSelector, ratio: float | None, num_layers: int
) -> tuple[float, float]:
    """How many reusable tokens a selector will have computed, and how many more rows it computes in order to choose.

    Both in tokens through all layers.
    """
    reusable = len(plan.reusable)
    if not reusable:
        return 0.0, 0.0
    if isinstance(selector, AttentionSelector):
        return float(selector.num_chosen(plan, ratio)), 0.75 * probe_rows(plan)
    if selector.check_layer is None:
        return float(len(selector.select(plan, ratio))), 0.0
    kept = share_of(reusable, (selector.default_ratio if ratio is None else ratio) or 0.0)
    dropped_late = (selector.check_layer + 1) / num_layers
    return float(kept), (reusable - kept) * dropped_late


def timed_prefills(adapter: ModelAdapter) -> Iterator[tuple[int, float]]:
    """Prefill short random prompts: how many tokens, and in how many seconds. Longer ones only where that is quick."""
    longest = min(adapter.config.max_position_embeddings, max(_TRIED_TOKENS))
    seconds = 0.0
    for tokens in _TRIED_TOKENS:
        if tokens > longest or seconds * tokens / _TRIED_TOKENS[0] > _LONGEST_TRY_S:
            return
        seconds = _time_of(adapter, tokens)
        if seconds < _LONGEST_TRY_S:  # once more, since the first one warms up
            seconds = min(seconds, _time_of(adapter, tokens))
        yield tokens, seconds


def _time_of(adapter: ModelAdapter, tokens: int) -> float:
    embeddings: Any = adapter.model.get_input_embeddings()
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, embeddings.num_embeddings, (1, tokens), generator=generator).to(adapter.device)
    start = time.perf_counter()
    with torch.no_grad():
        rows = adapter.model.base_model(input_ids=ids, use_cache=False)[0]
    rows[0, -1, 0].item()  # an accelerator has finished then, too
    return time.perf_counter() - start
