"""What vLLM's workers deliver becomes the rows that transformers would give. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_model
from contracts.kv import token_ids
from safetensors.torch import load, save

from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.transformers_prefill import TransformersPrefill
from rag_blend.vllm.prefill import VllmPrefill

CHUNKS = [token_ids(seed, length) for seed, length in ((1, 20), (2, 17))]
CONTEXT = token_ids(10, 12)
Reply = tuple[int, bytes]


class FakeLLM:
    """Workers that compute with transformers; each delivers some of the KV heads, as they are in a model's cache."""

    def __init__(self, adapter: ModelAdapter, ranks: list[slice]) -> None:
        self._adapter = adapter
        self._ranks = ranks

    def collective_rpc(self, method: str, args: tuple[list[int], int]) -> list[Reply]:
        assert method == "prefill_rows"
        ids, start = args
        cache = self._adapter.model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
        rows = [torch.stack([layer.keys[0, :, start:], layer.values[0, :, start:]]) for layer in cache.layers]
        return [
            (heads.start, save({f"layer.{i:03d}": layer[:, heads].contiguous() for i, layer in enumerate(rows)}))
            for heads in self._ranks
        ]


@pytest.fixture
def adapter() -> ModelAdapter:
    return adapter_for(random_model(num_hidden_layers=3))


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT[:0]], ids=["behind a context", "behind nothing"])
@pytest.mark.parametrize(
    "ranks",
    [[slice(0, 2)], [slice(0, 1), slice(1, 2)], [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]],
    ids=["one rank", "two ranks", "more ranks than heads"],
)
@torch.no_grad()
def test_rows_are_those_of_transformers(adapter: ModelAdapter, ranks: list[slice], context: np.ndarray) -> None:
    given = VllmPrefill(FakeLLM(adapter, ranks), adapter).behind(context)(CHUNKS)
    expected = TransformersPrefill(adapter).behind(context)(CHUNKS)
    for layers, references in zip(given, expected, strict=True):
        for layer, reference in zip(layers, references, strict=True):
            torch.testing.assert_close(layer.keys, reference.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer.values, reference.values, atol=1e-5, rtol=1e-5)


def without_a_rank(replies: list[Reply]) -> list[Reply]:
    return replies[:1]


def without_a_layer(replies: list[Reply]) -> list[Reply]:
    return [(first, save(dict(list(load(file).items())[:-1]))) for first, file in replies]


def with_one_row(replies: list[Reply]) -> list[Reply]:
    return [
        (first, save({name: rows[:, :, :1].contiguous() for name, rows in load(file).items()}))
        for first, file in replies
    ]


@pytest.mark.parametrize("damage", [without_a_rank, without_a_layer, with_one_row])
@torch.no_grad()
def test_what_is_not_whole_is_refused(
    adapter: ModelAdapter, damage: Callable[[list[Reply]], list[Reply]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = FakeLLM(adapter, [slice(0, 1), slice(1, 2)])
    deliver = llm.collective_rpc
    monkeypatch.setattr(llm, "collective_rpc", lambda *args, **kwargs: damage(deliver(*args, **kwargs)))
    with pytest.raises(RuntimeError, match=r"without \d of its 2 KV heads x 3 layers; it is not stored"):
        VllmPrefill(llm, adapter).behind(CONTEXT)(CHUNKS)
