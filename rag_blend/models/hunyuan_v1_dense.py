"""Hunyuan dense: a norm with a weight for every dimension comes behind RoPE, not in front of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rag_blend.errors import UnsupportedModelError
from rag_blend.models.base import ModelAdapter, describe
from rag_blend.rope import Angles


class Adapter(ModelAdapter):
    """Keys are rotated without that weight; what the norm divides by is the same at every position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if any(self._weight(layer_idx).is_meta for layer_idx in range(self.num_layers)):
            raise UnsupportedModelError(f"{describe(model)} cannot be blended: its norms' weights are not in memory.")

    def rotate_into(self, layer_idx: int, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """Rotate the keys, then scale them, as the model does."""
        super().rotate_into(layer_idx, target, keys, angles)
        target.mul_(self._weight(layer_idx).to(target.device, torch.float32))

    def add_rotated(self, layer_idx: int, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """As they are when they have been scaled."""
        rotated = torch.empty_like(target, dtype=torch.float32)
        self.rotate_into(layer_idx, rotated, keys.expand_as(target), angles)
        target += rotated

    def unrotate(self, layer_idx: int, keys: torch.Tensor, angles: Angles) -> torch.Tensor:
        """The inverse. A weight of zero has none, and the self-test refuses the model."""
        unscaled = keys.float() / self._weight(layer_idx).to(keys.device, torch.float32)
        return super().unrotate(layer_idx, unscaled, angles)

    def _weight(self, layer_idx: int) -> torch.Tensor:
        attention: Any = self._attentions[layer_idx]
        weight: torch.Tensor = attention.key_layernorm.weight
        return weight.detach()
