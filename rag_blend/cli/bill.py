"""What texts will take in a store, without loading the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SAMPLE_TOKENS = 512


@dataclass(frozen=True)
class Bill:
    """What is to be stored.

    Attributes:
        chunks: How many chunks; those that are too short to be cached do not count.
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
    from rag_blend.ingest import MIN_CHUNK_TOKENS

    lengths = [length for text in set(texts) if (length := len(tokenizer(text))) >= MIN_CHUNK_TOKENS]
    return Bill(len(lengths), sum(lengths), round(sum(lengths) * token_bytes))


def quota_warning(num_bytes: int, quota: int | None, place: str) -> str | None:
    """What to say, before anything is ingested, if a place does not hold so much."""
    from rag_blend.sizes import format_bytes

    if quota is None or num_bytes <= quota:
        return None
    return (
        f"the caches take about {format_bytes(num_bytes)}, but {place} holds {format_bytes(quota)} at most: what was "
        "not used for longest will be missing. Give it more room with --storage 'disk://DIR?quota=...' --index DIR, or "
        "write less: --codec int8 or int4"
    )


def bytes_per_token(model: str, codec: str, on_unsupported: str = "error", exact_first: bool = True) -> float:
    """What a token takes in all layers: made-up rows of the model's shape, written down by the codec.

    Args:
        model: Directory or hub id of the model.
        codec: Name of the codec.
        exact_first: See `BlendEngine`; chunks are kept twice.
        on_unsupported: See `BlendEngine`. Of a model that is served without blending, nothing is cached: 0. With
            "calibrated", a calibration is taken to have passed.

    Raises:
        UnsupportedModelError: Chunks of this model cannot be cached.
        ValueError: There is no such codec.
        ModuleNotFoundError: It needs a library; the text says what to install.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rag_blend.codecs import codec_of
    from rag_blend.errors import UnsupportedModelError
    from rag_blend.models import adapter_for

    chosen = codec_of(codec)
    with torch.device("meta"):  # shapes without weights
        config = AutoConfig.from_pretrained(model)
        shape = AutoModelForCausalLM.from_config(config)
    try:
        adapter = adapter_for(shape, windows=on_unsupported == "calibrated")
    except UnsupportedModelError:
        if on_unsupported == "error":
            raise
        return 0.0
    rows = torch.randn(2, adapter.num_kv_heads, _SAMPLE_TOKENS, adapter.head_dim)
    encoded = chosen.encode(rows.half() if chosen.lossless else rows)
    return (2 if exact_first else 1) * adapter.num_layers * len(encoded) / _SAMPLE_TOKENS
