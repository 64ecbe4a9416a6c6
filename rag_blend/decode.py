"""Decode several prefilled prompts at once: one pass over the weights brings a token for each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from rag_blend.cache import BlendCache
from rag_blend.generation import PieceStreamer
from rag_blend.models import cache_argument_of
from rag_blend.models.attention import packing
from rag_blend.space import SharedSpace

# What chooses tokens by their scores alone. Anything else may depend on where in the batch a prompt stands, or on the
# tokens that pad the shorter ones.
STEERING = frozenset({"do_sample", "temperature", "top_k", "top_p", "min_p"})
_NEUTRAL = STEERING | {
    "_from_model_config", "bos_token_id", "eos_token_id", "max_length", "max_new_tokens", "pad_token_id",
    "repetition_penalty", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Row:
    """One of the prompts, and what comes of it.

    Attributes:
        ids: The prompt, int32, shape (num_tokens,).
        max_new_tokens: Upper limit of its answer.
        stop: Its stop strings.
        cancel: Ends it when set.
        streamer: Is handed its tokens as they come.
        token_ids: Its new tokens.
        first_token_at: When the first one came, by `time.perf_counter`.
        done: Whether it has ended.
    """

    ids: np.ndarray
    max_new_tokens: int
    stop: tuple[str, ...]
    cancel: threading.Event
    streamer: PieceStreamer | None
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    done: bool = False


def can_decode_together(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether prompts with these arguments of ``model.generate`` get the answers in a batch that they get alone."""
    asked = {name for name, value in model.generation_config.to_diff_dict().items() if value not in (None, False)}
    return kwargs.keys() <= STEERING and asked <= _NEUTRAL


def decode_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    space: SharedSpace,
    kwargs: Mapping[str, Any],
) -> None:
    """Run ``model.generate`` on all rows until each has ended.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        rows: Prefilled prompts; their tokens are filled in.
        space: Where they lie, in the same order.
        kwargs: Arguments of ``model.generate``, as `can_decode_together` allows.
    """
    longest = space.longest
    for row in rows:
        if row.streamer is not None:
            row.streamer.begin()
    input_ids = torch.tensor(np.stack([_padded(row.ids, longest) for row in rows]), dtype=torch.long)
    mask = torch.tensor([[0] * (longest - len(row.ids)) + [1] * len(row.ids) for row in rows])
    device = model.device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # All tokens but the last ones, which `generate` computes.
    cache = BlendCache.holding(space.first(len(rows)), longest - 1)
    with packing(model):
        loop: Any = model
        loop.generate(
            input_ids.to(device),
            attention_mask=mask.to(device),
            stopping_criteria=StoppingCriteriaList([_EachRow(model, tokenizer, rows)]),
            max_new_tokens=max(row.max_new_tokens for row in rows),
            use_cache=True,
            **({"pad_token_id": pad} if model.generation_config.pad_token_id is None else {}),
            **{cache_argument_of(model): cache},
            **kwargs,
        )


class _EachRow(StoppingCriteria):
    """Takes each row's new token, and says which rows have ended."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> None:
        self._rows = rows
        ends: Any = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        words = {row.stop for row in rows if row.stop}
        self._stops = {stop: StopStringCriteria(tokenizer, list(stop)) for stop in words}

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """One answer per row: whether it has ended."""
        now = time.perf_counter()
        for index, (row, token) in enumerate(zip(self._rows, input_ids[:, -1].tolist(), strict=True)):
            if not row.done:
                self._take(row, token, input_ids[index : index + 1], now)
        return torch.tensor([row.done for row in self._rows], device=input_ids.device)

    def _take(self, row: Row, token: int, sequence: torch.Tensor, now: float) -> None:
        row.token_ids.append(token)
        row.first_token_at = row.first_token_at or now
        if row.streamer is not None:
            row.streamer.take(token)
        ended = token in self._ends or len(row.token_ids) >= row.max_new_tokens or row.cancel.is_set()
        row.done = ended or bool(row.stop and self._stops[row.stop](sequence, None)[0])
        if row.done and row.streamer is not None:
            row.streamer.finish()


def _padded(ids: np.ndarray, length: int) -> np.ndarray:
    """The prompt behind copies of its own first token: nobody sees them, and no penalty for repetition counts them."""
    return np.concatenate([np.repeat(ids[:1], length - len(ids)), ids])
