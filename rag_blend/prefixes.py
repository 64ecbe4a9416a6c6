"""Answered prompts are kept in memory: a prompt that begins like one of them goes on from there.

Of a prompt that was prefilled exactly any beginning serves. One that was blended serves only as a whole, for the tokens
that were recomputed in it are those that its own question needed, and it stays marked as an approximation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.prompt import common_prefix

Recipe = Hashable
MIN_TOKENS = 16  # fewer are computed as fast as they are copied


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt, as it was prefilled.

    Attributes:
        token_ids: Its ids, int32, shape (num_tokens,).
        layers: One `LayerKV` per layer, keys after RoPE, (num_kv_heads, num_tokens, head_dim) each; not to be
            written to.
        frequencies: The RoPE frequencies of the prompts it is true for, see `Rotary.frequencies`.
        recipe: How it was blended, see `BlendPolicy.recipe`. None: it is exact.
        least: So many of its tokens another prompt must begin with.
    """

    token_ids: np.ndarray
    layers: Sequence[LayerKV]
    frequencies: torch.Tensor
    recipe: Recipe | None = None
    least: int = MIN_TOKENS

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory that its rows take."""
        return sum(side.nbytes for kv in self.layers for side in kv)

    def common(self, token_ids: np.ndarray, frequencies: torch.Tensor) -> int:
        """How many tokens at the start of such a prompt have the same rows; 0 if they are too few."""
        if not torch.equal(self.frequencies, frequencies):
            return 0
        length = common_prefix(self.token_ids, token_ids)
        return length if length >= self.least else 0

    def first(self, num_tokens: int) -> Prefix:
        """Its first tokens; the rows are views."""
        layers = [LayerKV(*(side[:, :num_tokens] for side in kv)) for kv in self.layers]
        return replace(self, token_ids=self.token_ids[:num_tokens], layers=layers)

    def copy(self) -> Prefix:
        """The same in main memory of its own, whatever it was a part of."""
        layers = [LayerKV(_copy(kv.keys), _copy(kv.values)) for kv in self.layers]
        return replace(self, token_ids=self.token_ids.copy(), layers=layers)


NOTHING = Prefix(np.empty(0, dtype=np.int32), (), torch.empty(0))


class PrefixCache:
    """Rows of the last prompts, those used longest ago dropped first. Not thread-safe: the engine serialises.

    The rows stand at the positions they had and are copied bit by bit, in the model's own dtype, keys after RoPE. That
    is right where the RoPE frequencies are the same; with dynamic and long RoPE they may depend on a prompt's length,
    and then neither keys nor anything above the first layer can be used in a prompt of another length.

    Args:
        max_bytes: Memory for all rows together. 0: nothing is kept.

    Raises:
        ValueError: It is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"prefix_cache_bytes must be at least 0, got {max_bytes}")
        self._max_bytes = max_bytes
        self._kept: list[Prefix] = []  # the one used last is at the end

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        return sum(prefix.num_bytes for prefix in self._kept)

    def find(self, token_ids: np.ndarray, frequencies: torch.Tensor, recipe: Recipe | None = None) -> Prefix:
        """The longest kept beginning of a prompt, without its last token; `NOTHING` if it is not worth it.

        Args:
            token_ids: The prompt, int32, shape (num_tokens,).
            frequencies: See `Prefix`.
            recipe: What was blended so will do as well. None: exact ones only.
        """
        usable = [prefix for prefix in reversed(self._kept) if prefix.recipe in (None, recipe)]
        found = max(usable, key=lambda prefix: prefix.common(token_ids, frequencies), default=NOTHING)
        length = min(found.common(token_ids, frequencies), len(token_ids) - 1)
        if length < MIN_TOKENS:
            return NOTHING
        self._touch(found)
        return found.first(length)

    def keep(self, prefix: Prefix) -> None:
        """Keep a copy of a prompt's beginning, or as much of it as there is memory for."""
        if len(prefix) < prefix.least:
            return
        prefix = prefix.first(self._max_bytes * len(prefix) // prefix.num_bytes)
        if len(prefix) < prefix.least:
            return
        for kept in self._kept:
            if kept.recipe == prefix.recipe and kept.common(prefix.token_ids, prefix.frequencies) == len(prefix):
                self._touch(kept)
                return
        self._kept = [
            kept
            for kept in self._kept
            if kept.recipe != prefix.recipe or kept.common(prefix.token_ids, prefix.frequencies) < len(kept)
        ]
        while self.num_bytes + prefix.num_bytes > self._max_bytes:
            del self._kept[0]
        self._kept.append(prefix.copy())

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()

    def _touch(self, prefix: Prefix) -> None:
        self._kept = [*(kept for kept in self._kept if kept is not prefix), prefix]


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
