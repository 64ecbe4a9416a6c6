"""Digests of a model and its tokenizer: by content, so that a copied or renamed model keeps its caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.chunk import ModelFingerprint, digest_json
from rag_blend.models import adapter_state

# What a configuration says about files and defaults rather than about the function the model computes.
_NOT_THE_FUNCTION = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def stored_dtype(compute_dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype of stored keys and values: the one asked for, else the model's own if it has 16 bits, else float16."""
    return asked or (compute_dtype if compute_dtype.itemsize == 2 else torch.float16)


def fingerprint_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kv_dtype: torch.dtype
) -> ModelFingerprint:
    """The fingerprint of a loaded model; reads all weights once (about a second per 16 GB)."""
    return ModelFingerprint(
        weights=_weights_digest(model),
        config=_config_digest(model),
        tokenizer=_tokenizer_digest(tokenizer),
        compute_dtype=_name(model.dtype),
        kv_dtype=_name(kv_dtype),
    )


def _weights_digest(model: PreTrainedModel) -> str:
    # xxh3 guards against another checkpoint, not against an attacker who can choose the weights.
    digest = xxhash.xxh3_128()
    kept = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    # Quantised weights are buffers, not parameters. Buffers that are not saved follow from the configuration.
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    known = {id(tensor) for tensor in (*parameters.values(), *buffers.values())}
    # What else is saved: tied weights once more, and what some kinds of quantised weights are scaled with.
    others = {name: value for name, value in kept.items() if id(value) not in known}
    for name, value in sorted({**others, **parameters, **buffers}.items()):
        for part, tensor in _tensors_in(name, value):
            digest.update(f"{part}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a saved value consists of; what else it says is made part of their names."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        yield name, value.dequantize()
    elif is_traceable_wrapper_subclass(value):  # several tensors that pass for one
        inner, context = value.__tensor_flatten__()
        for attribute in inner:
            yield from _tensors_in(f"{name}.{attribute}:{context}", getattr(value, attribute))
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{name}.{index}", item)
    else:
        yield f"{name}={value!r}", torch.empty(0)


def _config_digest(model: PreTrainedModel) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_THE_FUNCTION}
    if adapters := adapter_state(model):
        config["adapters_at_work"] = adapters
    return digest_json(json.loads(json.dumps(config, default=str)))


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest_json(sorted(tokenizer.get_vocab().items()))
    state = json.loads(backend.to_str())
    # Both are set as a side effect of calling a tokenizer with padding=True or truncation=True.
    state.pop("padding", None)
    state.pop("truncation", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
