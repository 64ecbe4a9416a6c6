"""Falcon with RoPE: what its cache holds differs from what its configuration says."""

from __future__ import annotations

from transformers import PreTrainedModel

from rag_blend.models.base import ModelAdapter


class Adapter(ModelAdapter):
    """The new decoder architecture repeats keys and values for every query head before it caches them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config = model.config
        if config.new_decoder_architecture or not config.multi_query:
            self.num_kv_heads = config.num_attention_heads
        else:
            self.num_kv_heads = 1
