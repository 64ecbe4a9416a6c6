"""What texts will take in a store, without loading the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SAMPLE_TOKENS = 512


@dataclass(frozen=True)
class Bill:
    """What is to be stored.

    Attributes:
        chunks: How many chunks.
        tokens: Their tokens.
        bytes: Their caches, about.
    """

    chunks: int
    tokens: int
    bytes: int


def bill_of(texts: Sequence[str], tokenizer: Callable[[str], list[int]], token_bytes: float) -> Bill:
    """Count tokens, and what they take. Equal texts are stored once.

    Args:
        texts: The chunks.
        tokenizer: From a text to its token ids.
        token_bytes: See `bytes_per_token`.
    """
    distinct = set(texts)
    tokens = sum(len(tokenizer(text)) for text in distinct)
    return Bill(len(distinct), tokens, round(tokens * token_bytes))


def bytes_per_token(model: str, codec: str) -> float:
    """What a token takes in all layers: made-up rows of the model's shape, written down by the codec.

    Args:
        model: Directory or hub id of the model.
        codec: Name of the codec.

    Raises:
        UnsupportedModelError: Chunks of this model cannot be cached.
        ValueError: There is no such codec.
        ModuleNotFoundError: It needs a library; the text says what to install.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rag_blend.codecs import codec_of
    from rag_blend.models import adapter_for

    chosen = codec_of(codec)
    with torch.device("meta"):  # shapes without weights
        config = AutoConfig.from_pretrained(model)
        adapter = adapter_for(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    rows = torch.randn(2, adapter.num_kv_heads, _SAMPLE_TOKENS, adapter.head_dim)
    encoded = chosen.encode(rows.half() if chosen.lossless else rows)
    return adapter.num_layers * len(encoded) / _SAMPLE_TOKENS
