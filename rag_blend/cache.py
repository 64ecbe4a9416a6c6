"""A transformers cache whose prefill may be a blend, and which then grows in place while decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer

from rag_blend.chunk import LayerKV
from rag_blend.space import OwnSpace, Space, copied


class KVPlacer(Protocol):
    """Puts freshly computed rows among the reused ones."""

    def place(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerKV, int]:
        """Whole keys and values of a layer, (batch, num_kv_heads, capacity, head_dim) each, and how many rows count."""


class GrowingLayer(DynamicLayer):
    """A dynamic layer that appends into spare room instead of copying itself for every token.

    Args:
        space: Where the rows of a plain prefill lie.
        placer: Completes the first update; None makes it a plain prefill.
        layer_idx: Which layer this is.
    """

    def __init__(self, space: Space, placer: KVPlacer | None, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._space = space
        self._placer = placer
        self._layer_idx = layer_idx
        self.began_at = 0.0  # when the first rows came; by `time.perf_counter`
        self._spare: LayerKV | None = None  # the buffers that self.keys and self.values are the beginning of

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new rows and return all rows so far, (batch, num_kv_heads, num_tokens, head_dim) each."""
        if not self.is_initialized:
            self._initialise(key_states)
            return self._begin(key_states, value_states)
        if not self._append(key_states, value_states):
            self._spare = None
            super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _initialise(self, keys: torch.Tensor) -> None:
        """As `lazy_initialization`, whose arguments differ between versions of transformers."""
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.began_at = time.perf_counter()
        if self._placer is not None:
            self._spare, length = self._placer.place(self._layer_idx, keys, values)
        else:
            length = keys.shape[-2]
            self._spare = copied(LayerKV(keys, values), self._space, self._layer_idx)
        return self._show(length)

    def hold(self, spare: LayerKV, length: int) -> None:
        """Take over rows: the first `length` of `spare`, (batch, num_kv_heads, capacity, head_dim) each."""
        self._initialise(spare.keys)
        self._spare = spare
        self._show(length)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Write behind the rows there are; False when something else has replaced them or the room is used up."""
        if self._spare is None or self.keys is None or self.keys.data_ptr() != self._spare.keys.data_ptr():
            return False
        start = self.keys.shape[-2]
        end = start + keys.shape[-2]
        if end > self._spare.keys.shape[-2] or keys.shape[0] != self._spare.keys.shape[0]:
            return False
        self._spare.keys[..., start:end, :] = keys
        self._spare.values[..., start:end, :] = values
        self._show(end)
        return True

    def _show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._spare is not None
        self.keys = self._spare.keys[..., :length, :]
        self.values = self._spare.values[..., :length, :]
        return self.keys, self.values


class BlendCache(Cache):
    """One `GrowingLayer` per decoder layer.

    Args:
        num_layers: Number of decoder layers.
        space: Where the rows of a plain prefill lie. None: there is room for no more than those.
        placer: Completes the first update of each layer; None makes it an ordinary empty cache.
    """

    def __init__(self, num_layers: int, space: Space | None = None, placer: KVPlacer | None = None) -> None:
        self._growing = [GrowingLayer(space or OwnSpace(), placer, i) for i in range(num_layers)]
        super().__init__(layers=list(self._growing))

    @classmethod
    def holding(cls, layers: Sequence[LayerKV], length: int) -> BlendCache:
        """A cache whose layers are the first `length` rows of these, and which grows into the rest."""
        cache = cls(len(layers))
        for layer, spare in zip(cache._growing, layers, strict=True):
            layer.hold(spare, length)
        return cache

    @property
    def began_at(self) -> float:
        """When the first layer's rows came, by `time.perf_counter`."""
        return self._growing[0].began_at

    @property
    def prefill_s(self) -> float:
        """Seconds from the first layer's rows to the last layer's, in the prefill.

        0 on an accelerator, which computes behind the clock's back.
        """
        first, last = self._growing[0], self._growing[-1]
        if first.keys is None or first.keys.device.type != "cpu":
            return 0.0
        return last.began_at - first.began_at


def kv_of(cache: Cache, layer_idx: int) -> LayerKV:
    """A layer's keys and values, (batch, num_kv_heads, num_tokens, head_dim) each, as views."""
    layer = cache.layers[layer_idx]
    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    return LayerKV(layer.keys, layer.values)
