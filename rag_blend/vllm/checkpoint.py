"""The model that vLLM serves, as the Hugging Face engine knows it: its fingerprint and its geometry.

vLLM fuses weights when it loads them, so they cannot be digested there. The checkpoint is loaded once more, the way
the Hugging Face engine loads it, digested by the very same function, and dropped: one rule for both, and nothing to
keep in step. That costs a start some seconds and, for the moment, the model's size in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.errors import UnsupportedModelError
from rag_blend.fingerprint import fingerprint_of
from rag_blend.loading import load
from rag_blend.models import ModelAdapter, adapter_for


def read_checkpoint(
    path_or_hub_id: str, dtype: torch.dtype, kv_dtype: torch.dtype, revision: str | None = None
) -> tuple[str, PreTrainedTokenizerBase]:
    """A checkpoint's fingerprint digest and its tokenizer.

    Args:
        path_or_hub_id: Local directory or hub id.
        dtype: In which it computes.
        kv_dtype: In which keys and values are stored.
        revision: Of the hub id.

    Raises:
        OSError: There is no such model.
    """
    model, tokenizer = load(path_or_hub_id, "cpu", dtype, {"revision": revision} if revision else None)
    return fingerprint_of(model, tokenizer, kv_dtype).digest, tokenizer


def geometry_of(path_or_hub_id: str, dtype: torch.dtype, revision: str | None = None) -> ModelAdapter:
    """An adapter without weights, on the CPU: it knows heads, layers and RoPE, and what cannot be blended.

    Raises:
        UnsupportedModelError: The model cannot be blended.
        OSError: There is no such model.
    """
    config = AutoConfig.from_pretrained(path_or_hub_id, revision=revision)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return adapter_for(_with_rotary(model, dtype))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(error.reason, servable=False) from error
    except ValueError as error:  # no causal language model of transformers
        raise UnsupportedModelError(f"{path_or_hub_id} cannot be blended: {error}", servable=False) from error


def _with_rotary(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with a rotary module that has memory, and a first parameter that says where and in what it computes."""
    decoder: Any = model.get_decoder()
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    embeddings: Any = model.get_input_embeddings()
    model.set_input_embeddings(torch.nn.Embedding(1, embeddings.embedding_dim, dtype=dtype))
    return model
