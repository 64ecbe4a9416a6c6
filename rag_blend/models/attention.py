"""Attention of few rows to many keys, without repeating the keys for every query head."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # spelled otherwise before transformers 5

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # see `packed_attention`
_NAME = "rag_blend_packed"
# What torch's attention on CPUs takes in one piece, 64 rows, it takes if there are so many; fewer see less in vain.
_PACKED_ROWS = 192
_MOST_ROWS_OF_A_BLOCK = 96
_MOST_MASK_BYTES = 256_000_000
_MASKS_AT_ONCE = 2  # of layers with and without a window


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


class _Block(NamedTuple):
    """Rows that are attended to together.

    Attributes:
        rows: Which of the rows.
        near: From where to where the keys lie that they may see.
        mask: Additive, (1, 1, query heads that share a key head x rows, keys); None: too large to be kept.
    """

    rows: slice
    near: slice
    mask: torch.Tensor | None


class FewRows:
    """SDPA of some rows of a prompt, which copies no keys and skips what no row of a block may see.

    The query heads that share a key head are rows of one attention, for on a CPU its blocks of keys are then read once
    for all of them; and the mask is turned into numbers once, not in each layer. One object serves one prefill.
    Single rows, and batches of which each member sees something else, are left to `packed_attention`.
    """

    def __init__(self) -> None:
        self._known: deque[tuple[torch.Tensor, list[_Block]]] = deque(maxlen=_MASKS_AT_ONCE)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `packed_attention`."""
        batch, heads, rows, dim = query.shape
        if attention_mask is None or attention_mask.shape[1] != 1 or kwargs.get("position_bias") is not None:
            return packed_attention(module, query, key, value, attention_mask, **kwargs)
        if rows == 1 or (attention_mask.shape[0] > 1 and attention_mask.stride(0) != 0):
            return packed_attention(module, query, key, value, attention_mask, **kwargs)
        kv_heads, groups = key.shape[1], heads // key.shape[1]
        queries = query.view(batch, kv_heads, groups, rows, dim)
        output = query.new_empty((batch, rows, kv_heads, groups, value.shape[-1]))
        for block, near, mask in self._blocks_of(attention_mask, groups, query.dtype):
            seen = torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, :, block].reshape(batch, kv_heads, -1, dim),
                key[:, :, near],
                value[:, :, near],
                attn_mask=_additive(attention_mask[0, 0, block, near], groups, query.dtype) if mask is None else mask,
                dropout_p=kwargs.get("dropout", 0.0),
                scale=kwargs.get("scaling"),
            )
            output[:, block] = seen.view(batch, kv_heads, groups, -1, value.shape[-1]).permute(0, 3, 1, 2, 4)
        return output.view(batch, rows, heads, value.shape[-1]), None

    def _blocks_of(self, mask: torch.Tensor, groups: int, dtype: torch.dtype) -> list[_Block]:
        """Found once for all layers with the same mask."""
        for known, blocks in self._known:
            if known is mask:
                return blocks
        count, num_tokens = mask.shape[2:]
        size = min(_MOST_ROWS_OF_A_BLOCK, -(-_PACKED_ROWS // groups))
        kept = count * groups * num_tokens * dtype.itemsize <= _MOST_MASK_BYTES
        blocks = []
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            near = _seen_by(mask[0, 0, rows])
            blocks.append(_Block(rows, near, _additive(mask[0, 0, rows, near], groups, dtype) if kept else None))
        self._known.append((mask, blocks))
        return blocks


def _additive(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask of (rows, keys), True or 0 where a row may look, as one to be added, (1, 1, groups x rows, keys)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype).repeat(groups, 1)[None, None]


def _seen_by(rows: torch.Tensor) -> slice:
    """From the first to the last key that some of these rows of a mask let through."""
    visible = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min
    seen = visible.any(dim=0).nonzero()
    return slice(int(seen[0]), int(seen[-1]) + 1)


def is_replaceable(model: PreTrainedModel) -> bool:
    """Whether the model calls the attention function that transformers has registered, so that it can be ours.

    Some families have attention written into their layers: it can be neither packed nor watched.
    """
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


def eager_attention_of(model: PreTrainedModel) -> AttentionFunction | None:
    """The family's own function, if that is what the model uses: only it knows its sinks and soft caps."""
    if model.config._attn_implementation != "eager":
        return None
    function: AttentionFunction | None = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    return function


@contextlib.contextmanager
def packing(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that uses sdpa use `FewRows` for the time being; others are left alone."""
    if model.config._attn_implementation != "sdpa" or not is_replaceable(model):
        yield
        return
    with attending(model.config, _NAME, FewRows()):
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
