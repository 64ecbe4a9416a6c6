"""Cohere 2: layers without a window know no positions."""

from __future__ import annotations

from typing import Any

from rag_blend.models.base import ModelAdapter


class Adapter(ModelAdapter):
    """RoPE stands in layers whose attention slides."""

    def rotates(self, layer_idx: int) -> bool:
        """Whether the layer is one of them."""
        attention: Any = self._attentions[layer_idx]
        return attention.sliding_window is not None
