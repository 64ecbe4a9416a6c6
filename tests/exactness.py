"""What the tests of exactness share: prompts, full prefill, and a blend over rows that are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import small_tokenizer
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rag_blend import BlendEngine
from rag_blend.blend import BlendPass
from rag_blend.cache import BlendCache
from rag_blend.chunk import LayerKV
from rag_blend.match import Match
from rag_blend.models import ModelAdapter, cache_argument_of
from rag_blend.plan import plan_blend
from rag_blend.selectors.all import AllSelector

HEAD = "<|im_start|>user\nAnswer the question from the water and light of the valley below.\n"
QUESTION = "\n\nwhich river under the bridge?<|im_end|>\n"


def full_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert float((got - expected).abs().max() / expected.abs().max()) <= tolerance


def prompt_of(engine: BlendEngine, head: str, chunks: list[str], question: str) -> list[int]:
    ids: list[int] = engine.tokenizer(head + "\n\n".join(chunks) + question, add_special_tokens=False)["input_ids"]
    return ids


def full_cache(model: PreTrainedModel, ids: list[int]) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=True, **{cache_argument_of(model): cache})
    return cache


def assert_a_store_gives_back_what_it_was_given(
    model: PreTrainedModel, texts: list[str], place: Path, **options: Any
) -> None:
    """Blended logits are the same from memory, from files just written, and from files that are found."""
    logits = []
    for storage in (None, place, place):
        with BlendEngine(model, small_tokenizer(), storage, **options) as engine:
            engine.ingest(texts, head=HEAD, progress=False)
            prefill = engine.prefill(prompt_of(engine, HEAD, texts[1:4], QUESTION), selector="anchor")
            assert prefill.stats.hits == 4 and prefill.stats.reused_tokens > 100
            logits.append(prefill.logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


class ExactRows:
    """Stored rows taken from a full prefill of the same prompt, so that any set of recomputed rows is exact."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    def layer(self, layer_idx: int) -> LayerKV:
        layer = self.cache.layers[layer_idx]
        return LayerKV(layer.keys.clone(), layer.values.clone())


def blend_over_exact_rows(adapter: ModelAdapter, ids: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, BlendCache]:
    num_tokens = ids.shape[1]
    cache = full_cache(adapter.model, ids[0].tolist())
    with torch.no_grad():
        chunk = Match("", 3, num_tokens - 6, 0, num_tokens - 6)
        plan = plan_blend(num_tokens, [], [chunk])
        blend = BlendPass(adapter, plan, np.asarray(rows, dtype=np.int64), ExactRows(cache), AllSelector())
        blended = BlendCache(adapter.num_layers, placer=blend)
        with adapter.layer_hooks(blend.before_layer, blended):
            logits = adapter.model(ids, use_cache=True, **{adapter.cache_argument: blended}).logits
    return logits[0], blended
