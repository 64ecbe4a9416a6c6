"""Prefill of chunks behind a context by a model of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from rag_blend.cache import kv_of
from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.prefiller import PrefillBehind
from rag_blend.rope import Angles


class TransformersPrefill:
    """See `PrefillModel`; a batch of chunks is one forward.

    Args:
        adapter: The model.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def behind(self, context: np.ndarray) -> PrefillBehind:
        """Prefill behind one context, whose own cache is computed once."""
        return _Behind(self._adapter, context)


class _Behind:
    def __init__(self, adapter: ModelAdapter, context: np.ndarray) -> None:
        self._adapter = adapter
        self._context = context
        self._prefix: DynamicCache | None = None

    def __call__(self, chunks: Sequence[np.ndarray]) -> list[list[LayerKV]]:
        """See `PrefillBehind`."""
        self._adapter.weights.require_same()
        ids = np.zeros((len(chunks), max(map(len, chunks))), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = chunk  # padding behind a chunk is invisible to it
        return self._prefill(ids, chunks)

    def _prefill(self, ids: np.ndarray, chunks: Sequence[np.ndarray]) -> list[list[LayerKV]]:
        context, start, device = self._context, len(self._context), self._adapter.device
        same = self._adapter.rotary.same_angles
        if not same(*(start + len(chunk) for chunk in chunks), device=device):  # padding would change their angles
            return [self._prefill(chunk[None], [chunk])[0] for chunk in chunks]
        if start and not same(start, start + ids.shape[1], device=device):
            cache = self._run(np.concatenate([np.tile(context, (len(ids), 1)), ids], axis=1), None)
        else:
            if self._prefix is None and start:
                self._prefix = self._run(context[None], None)
            cache = self._run(ids, self._prefix)
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
        # Behind a context, the model's own attention on a CPU would compute what its mask then hides.
        blocks = adapter.packing() if prefix is not None and adapter.device.type == "cpu" else contextlib.nullcontext()
        with blocks:
            adapter.model.base_model(input_ids=input_ids, use_cache=True, **{adapter.cache_argument: cache})
        return cache

    def _rows(self, cache: DynamicCache, row: int, angles: Angles, start: int, end: int) -> list[LayerKV]:
        layers = []
        for layer_idx in range(self._adapter.num_layers):
            keys, values = (side[row : row + 1, :, start:end] for side in kv_of(cache, layer_idx))
            unrotated = self._adapter.unrotate(layer_idx, keys, angles.at(start, end))
            layers.append(LayerKV(unrotated[0], values[0].float()))
        return layers
