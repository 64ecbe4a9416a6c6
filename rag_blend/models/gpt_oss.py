"""gpt-oss: its rotary module gives each angle once, for both halves of a head."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rag_blend.models.base import ModelAdapter
from rag_blend.rope import Angles, Rotary


class Adapter(ModelAdapter):
    """Its keys are rotated as Llama's, by twice as many angles; fewer would mean that a part of a head is not."""

    def _find_rotary(self, decoder: Any) -> Rotary:
        return _TwoHalves(decoder.rotary_emb, apply_rotary_pos_emb)


class _TwoHalves(Rotary):
    def _angles_at(self, position_ids: torch.Tensor) -> Angles:
        return Angles(*(torch.cat([side, side], dim=-1) for side in super()._angles_at(position_ids)))
