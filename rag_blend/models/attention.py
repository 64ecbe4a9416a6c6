"""Attention of few rows to many keys, without repeating the keys for every query head."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # spelled otherwise before transformers 5

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # see `packed_attention`
_NAME = "rag_blend_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SDPA in which the query heads that share a key head are rows of one attention.

    Under a mask, transformers copies keys and values for every query head; for a few rows of a long prompt that costs
    more than the attention itself.

    Args:
        module: The attention module.
        query: (batch, num_heads, num_rows, head_dim).
        key: (batch, num_kv_heads, num_tokens, head_dim).
        value: Like `key`.
        attention_mask: (batch or 1, 1, num_rows, num_tokens), True where a row may look; anything else is left to
            transformers.
        kwargs: As transformers passes them.

    Returns:
        (batch, num_rows, num_heads, head_dim), and no weights.
    """
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * rows, dim),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


def is_replaceable(model: PreTrainedModel) -> bool:
    """Whether the model calls the attention function that transformers has registered, so that it can be ours.

    Some families have attention written into their layers: it can be neither packed nor watched.
    """
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


@contextlib.contextmanager
def packing(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that uses sdpa use `packed_attention` for the time being; others are left alone."""
    if model.config._attn_implementation != "sdpa" or not is_replaceable(model):
        yield
        return
    with attending(model.config, _NAME, packed_attention):
        yield


@contextlib.contextmanager
def attending(config: PreTrainedConfig, name: str, function: AttentionFunction) -> Iterator[None]:
    """Let a model use an attention function of ours, known to transformers by `name`, for the time being.

    The function is this thread's. The registry is everybody's: whoever else runs the model meanwhile gets
    `packed_attention`.
    """
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, sdpa_mask)  # or decoding several tokens at once would get no mask
    usual = config._attn_implementation
    acting = _ACTING.set(function)
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual
        _ACTING.reset(acting)


_ACTING: ContextVar[AttentionFunction] = ContextVar("acting attention function", default=packed_attention)


def _attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _ACTING.get()(*args, **kwargs)
