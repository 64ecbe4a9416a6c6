"""Prefill of chunks behind their contexts, and the mean of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from rag_blend.cache import kv_of
from rag_blend.chunk import Context, LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.rope import Angles


class Prefilled(NamedTuple):
    """One chunk, prefilled.

    Attributes:
        layers: Keys before RoPE and values, float32, (num_kv_heads, num_tokens, head_dim) each.
        staleness: See `ChunkKV.staleness`; None if there was only one context.
    """

    layers: list[LayerKV]
    staleness: np.ndarray | None


class ChunkPrefiller:
    """Prefills chunks directly behind one or several contexts and takes the weighted mean of their caches.

    Args:
        adapter: The model.
        contexts: The contexts, their weights adding up to 1. Their own caches are computed once.
    """

    def __init__(self, adapter: ModelAdapter, contexts: Sequence[Context]) -> None:
        self._adapter = adapter
        self._contexts = contexts
        self._prefixes: dict[int, DynamicCache] = {}

    @torch.no_grad()
    def prefill(self, chunks: Sequence[np.ndarray]) -> list[Prefilled]:
        """Prefill a batch.

        Args:
            chunks: Token ids of each chunk, best of similar length.
        """
        self._adapter.weights.require_same()
        ids = np.zeros((len(chunks), max(map(len, chunks))), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = chunk  # padding behind a chunk is invisible to it
        if len(self._contexts) == 1:
            return [Prefilled(layers, None) for layers in self._behind(0, ids, chunks)]
        means = [_Mean() for _ in chunks]
        for number, context in enumerate(self._contexts):
            for mean, layers in zip(means, self._behind(number, ids, chunks), strict=True):
                mean.add(layers, context.weight)
        return [mean.result() for mean in means]

    def _behind(self, number: int, ids: np.ndarray, chunks: Sequence[np.ndarray]) -> list[list[LayerKV]]:
        context = self._contexts[number].token_ids
        start, device = len(context), self._adapter.device
        same = self._adapter.rotary.same_angles
        if not same(*(start + len(chunk) for chunk in chunks), device=device):  # padding would change their angles
            return [self._behind(number, chunk[None], [chunk])[0] for chunk in chunks]
        if start and not same(start, start + ids.shape[1], device=device):
            cache = self._run(np.concatenate([np.tile(context, (len(ids), 1)), ids], axis=1), None)
        else:
            if number not in self._prefixes and start:
                self._prefixes[number] = self._run(context[None], None)
            cache = self._run(ids, self._prefixes.get(number))
        angles = self._adapter.rotary.angles(start + ids.shape[1], device)
        return [self._rows(cache, row, angles, start, start + len(chunk)) for row, chunk in enumerate(chunks)]

    def _run(self, ids: np.ndarray, prefix: DynamicCache | None) -> DynamicCache:
        adapter = self._adapter
        cache = DynamicCache()
        if prefix is not None:
            for layer_idx in range(adapter.num_layers):
                keys, values = (side.expand(len(ids), -1, -1, -1) for side in kv_of(prefix, layer_idx))
                cache.update(keys, values, layer_idx)
        input_ids = torch.from_numpy(ids).long().to(adapter.device)
        adapter.model.base_model(input_ids=input_ids, use_cache=True, **{adapter.cache_argument: cache})
        return cache

    def _rows(self, cache: DynamicCache, row: int, angles: Angles, start: int, end: int) -> list[LayerKV]:
        layers = []
        for layer_idx in range(self._adapter.num_layers):
            keys, values = (side[row : row + 1, :, start:end] for side in kv_of(cache, layer_idx))
            unrotated = self._adapter.unrotate(layer_idx, keys, angles.at(start, end))
            layers.append(LayerKV(unrotated[0], values[0].float()))
        return layers


class _Mean:
    """Weighted mean of one chunk's caches, and how far they differ."""

    def __init__(self) -> None:
        self._layers: list[LayerKV] = []
        self._squares: list[torch.Tensor] = []  # weighted mean square of each token, per layer and side

    def add(self, layers: Sequence[LayerKV], weight: float) -> None:
        squares = [weight * _mean_square(side) for layer in layers for side in layer]
        weighted = [LayerKV(layer.keys * weight, layer.values * weight) for layer in layers]
        if not self._layers:
            self._layers, self._squares = weighted, squares
            return
        for total, addend in zip(self._layers, weighted, strict=True):
            total.keys.add_(addend.keys)
            total.values.add_(addend.values)
        self._squares = [total + addend for total, addend in zip(self._squares, squares, strict=True)]

    def result(self) -> Prefilled:
        means = [_mean_square(side) for layer in self._layers for side in layer]
        # E[x^2] - E[x]^2, each side of each layer by its own scale
        spread = [(square - mean).clamp(min=0) / mean.mean() for square, mean in zip(self._squares, means, strict=True)]
        staleness = torch.stack(spread).mean(0)
        return Prefilled(self._layers, staleness.cpu().numpy().astype(np.float16))


def _mean_square(side: torch.Tensor) -> torch.Tensor:
    """Over heads and dimensions, shape (num_tokens,)."""
    return side.pow(2).mean(dim=(0, 2))
