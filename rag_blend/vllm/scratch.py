"""One worker's part of an ingestion: sequences that are no requests, in blocks that no request has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save

from rag_blend.chunk import LayerKV
from rag_blend.prompt import common_prefix

if TYPE_CHECKING:
    from rag_blend.vllm.paged import PagedModel

_NOTHING = np.empty(0, dtype=np.int32)


class ScratchPrefill:
    """Computes sequences behind contexts. A context's rows stay while there is room, so that they are computed once.

    Keys are taken as the attention layers get them, after RoPE, like those that the Hugging Face engine takes from its
    cache; see `VllmPrefill`.

    Args:
        model: The model inside vLLM.
        num_blocks: How many blocks its cache has.
        max_tokens: Length of a sequence at most.
        max_rows: Rows of a forward at most.
    """

    def __init__(self, model: PagedModel, num_blocks: int, max_tokens: int, max_rows: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        size = -(-max_tokens // model.tokens_per_block)
        starts = range(1, num_blocks - size + 1, size)  # vLLM has a use of its own for block 0
        self._places = [_Place(list(range(start, start + size))) for start in starts]

    def forget(self) -> None:
        """Somebody else may have written to the blocks."""
        for place in self._places:
            place.computed = _NOTHING

    @torch.inference_mode()
    def rows(self, token_ids: np.ndarray, start: int) -> bytes:
        """Prefill a sequence.

        Args:
            token_ids: Its ids, int32, shape (num_tokens,).
            start: Where its context ends, whose rows are not wanted.

        Returns:
            A safetensors file of one tensor per layer, ``layer.000`` ..., shape (2, this rank's heads, num_tokens -
            start, head_dim): keys after RoPE, then values.

        Raises:
            ValueError: It is too long, or vLLM's cache too small.
        """
        if len(token_ids) > self._max_tokens or not self._places:
            raise ValueError(f"vLLM's cache has no room for {len(token_ids)} tokens beside its own")
        place = self._place_for(token_ids[:start])
        known = common_prefix(place.computed, token_ids[:start])
        place.computed = token_ids[:known]  # should a forward fail
        parts = []
        for first, end in self._bursts(known, start, len(token_ids)):
            positions = np.arange(first, end)
            if first < start:
                self._model.forward(token_ids, place.block_ids, positions)
            else:
                parts.append(self._model.forward_and_keep(token_ids, place.block_ids, positions))
        place.computed = token_ids[:start]
        return _as_file(parts)

    def _place_for(self, context: np.ndarray) -> _Place:
        """The place where the context is, or else the one that was not used for longest."""
        same = (place for place in self._places if np.array_equal(place.computed, context))
        place = next(same, self._places[0])
        self._places.remove(place)
        self._places.append(place)
        return place

    def _bursts(self, known: int, start: int, end: int) -> list[tuple[int, int]]:
        """Stretches of at most `max_rows`, none of them on both sides of `start`."""
        return [
            (first, min(first + self._max_rows, last))
            for begin, last in ((known, start), (start, end))
            for first in range(begin, last, self._max_rows)
        ]


@dataclass(slots=True, eq=False)
class _Place:
    """Blocks of one sequence, and the context whose rows are in them."""

    block_ids: list[int]
    computed: np.ndarray = field(default_factory=lambda: _NOTHING)


def _as_file(parts: list[list[LayerKV]]) -> bytes:
    layers = {}
    for layer_idx, bursts in enumerate(zip(*parts, strict=True)):
        sides = (torch.cat(side, dim=1).cpu() for side in zip(*bursts, strict=True))
        layers[f"layer.{layer_idx:03d}"] = torch.stack(list(sides))
    file: bytes = save(layers)
    return file
