"""The rows of a prompt that a layer computes: their mask, their positions, their place among the stored rows."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter


class LayerSource(Protocol):
    """Where the stored rows come from; see `LayerPrefetcher`."""

    def layer(self, layer_idx: int) -> LayerKV:
        """Keys (after RoPE) and values, (1, num_kv_heads, num_tokens + room, head_dim), to be written to."""


class Replay:
    """Layers that were fetched before their turn, then the rest.

    Args:
        fetched: Layers by their index; each is handed out once.
        rest: Where the others come from.
    """

    def __init__(self, fetched: dict[int, LayerKV], rest: LayerSource) -> None:
        self._fetched = fetched
        self._rest = rest

    def layer(self, layer_idx: int) -> LayerKV:
        """See `LayerSource.layer`."""
        return self._fetched.pop(layer_idx, None) or self._rest.layer(layer_idx)


class RowSet:
    """Some rows of a prompt.

    Args:
        adapter: The model.
        num_tokens: Length of the prompt.
        positions: Positions of the rows, ascending, int64, shape (num_rows,).
        absent: Positions that nothing is known of, so that no row may look there. None: there are none.
    """

    def __init__(
        self, adapter: ModelAdapter, num_tokens: int, positions: torch.Tensor, absent: torch.Tensor | None = None
    ) -> None:
        self.positions = positions
        self._absent = absent
        self._adapter = adapter
        self._num_tokens = num_tokens
        self._additive = adapter.attention_is_additive  # now: a pass may name another attention for the time being
        self._arguments: dict[str, dict[str, Any]] = {}  # by type of layer

    def __len__(self) -> int:
        return len(self.positions)

    def arguments(self, layer_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A layer's arguments for these rows, from those for the whole prompt; built once for all layers of a type."""
        layer_type = self._adapter.layer_type(layer_idx)
        if layer_type not in self._arguments:
            self._arguments[layer_type] = self._cut_down(kwargs, self._adapter.window(layer_idx))
        return self._arguments[layer_type]

    def write(self, whole: LayerKV, fresh: LayerKV) -> None:
        """Write fresh rows, (batch, num_kv_heads, num_rows, head_dim), over the stored ones in `whole`."""
        if self._absent is not None:  # that memory may hold anything, and a weight of zero does not hide a NaN
            whole.values.index_fill_(2, self._absent, 0.0)
            whole.keys.index_fill_(2, self._absent, 0.0)
        whole.keys.index_copy_(2, self.positions, fresh.keys.to(whole.keys.dtype))
        whole.values.index_copy_(2, self.positions, fresh.values.to(whole.values.dtype))

    def indices_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Where these positions, a subset, stand among the rows."""
        return torch.searchsorted(self.positions, positions)

    def _cut_down(self, kwargs: dict[str, Any], window: int | None) -> dict[str, Any]:
        if len(self) == self._num_tokens:
            return {}  # the model's own mask is right, and its kernels for it are faster
        cos, sin = kwargs["position_embeddings"]
        arguments = {
            "position_embeddings": (cos[:, self.positions], sin[:, self.positions]),
            "attention_mask": self.mask(window),
        }
        for name in ("position_ids", "cache_position"):
            if kwargs.get(name) is not None:
                arguments[name] = kwargs[name][..., self.positions]
        return arguments

    def mask(self, window: int | None = None) -> torch.Tensor:
        """Each row sees every position up to its own that is not absent; shape (1, 1, num_rows, num_tokens).

        Args:
            window: Only so many of them, its own included; None: all.
        """
        everyone = torch.arange(self._num_tokens, device=self.positions.device)
        visible = everyone[None, :] <= self.positions[:, None]
        if window is not None:
            visible &= everyone[None, :] > self.positions[:, None] - window
        visible = visible[None, None]
        if self._absent is not None:
            visible[..., self._absent] = False
        if not self._additive:
            return visible
        hidden = torch.finfo(self._adapter.dtype).min
        return torch.zeros_like(visible, dtype=self._adapter.dtype).masked_fill(~visible, hidden)
