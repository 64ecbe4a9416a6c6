"""Sequences in vLLM's cache that are no requests. Needs no vLLM."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load

from rag_blend.chunk import LayerKV
from rag_blend.vllm.scratch import ScratchPrefill

SIZE, MAX_TOKENS, MAX_ROWS = 4, 24, 5
FIRST, SECOND = np.arange(10, dtype=np.int32), np.array([0, 1, 2, 30, 31, 32, 33], dtype=np.int32)
CHUNK, OTHER = np.arange(40, 52, dtype=np.int32), np.arange(60, 68, dtype=np.int32)


class Paged:
    """A model whose rows are the token ids that its blocks hold up to their position, so a wrong one shows."""

    tokens_per_block = SIZE

    def __init__(self, num_blocks: int) -> None:
        self.slots = np.full(num_blocks * SIZE, -1)
        self.computed = 0

    def forward(self, token_ids: np.ndarray, block_ids: list[int], positions: np.ndarray) -> None:
        self.forward_and_keep(token_ids, block_ids, positions)

    def forward_and_keep(self, token_ids: np.ndarray, block_ids: list[int], positions: np.ndarray) -> list[LayerKV]:
        assert 0 < len(positions) <= MAX_ROWS and 0 not in block_ids
        at = np.array([block_ids[p // SIZE] * SIZE + p % SIZE for p in range(len(token_ids))])
        self.slots[at[positions]] = token_ids[positions]
        self.computed += len(positions)
        seen = torch.tensor([float(self.slots[at[: p + 1]].sum()) for p in positions])
        return [LayerKV(seen[None, :, None], layer_idx - seen[None, :, None]) for layer_idx in range(2)]


def scratch_of(num_places: int) -> tuple[ScratchPrefill, Paged]:
    model = Paged(1 + num_places * MAX_TOKENS // SIZE)
    return ScratchPrefill(model, len(model.slots) // SIZE, MAX_TOKENS, MAX_ROWS), model


def assert_right(scratch: ScratchPrefill, context: np.ndarray, chunk: np.ndarray) -> None:
    ids = np.concatenate([context, chunk])
    layers = load(scratch.rows(ids, len(context)))
    seen = torch.from_numpy(np.cumsum(ids)[len(context) :]).float()
    assert sorted(layers) == ["layer.000", "layer.001"]
    for layer_idx, (_, (keys, values)) in enumerate(sorted(layers.items())):
        assert torch.equal(keys, seen[None, :, None]) and torch.equal(values, layer_idx - seen[None, :, None])


@pytest.mark.parametrize("num_places", [1, 2, 3])
def test_rows_are_those_of_the_sequence_whatever_was_there_before(num_places: int) -> None:
    scratch, _ = scratch_of(num_places)
    nothing = np.empty(0, dtype=np.int32)
    for context, chunk in [(FIRST, CHUNK), (FIRST, OTHER), (FIRST[:5], CHUNK), (SECOND, OTHER), (nothing, CHUNK)] * 2:
        assert_right(scratch, context, chunk)


def test_a_context_is_computed_once_while_there_is_room() -> None:
    scratch, model = scratch_of(num_places=2)
    for context in (FIRST, SECOND) * 2:
        assert_right(scratch, context, CHUNK)
    assert model.computed == len(FIRST) + len(SECOND) + 4 * len(CHUNK)


def test_without_room_what_contexts_have_in_common_is_computed_once() -> None:
    scratch, model = scratch_of(num_places=1)
    for context in (FIRST, SECOND):
        assert_right(scratch, context, CHUNK)
    assert model.computed == len(FIRST) + len(SECOND) - 3 + 2 * len(CHUNK)


def test_what_is_forgotten_is_computed_again() -> None:
    scratch, model = scratch_of(num_places=1)
    assert_right(scratch, FIRST, CHUNK)
    model.slots[:] = -1  # requests came between
    scratch.forget()
    assert_right(scratch, FIRST, CHUNK)


def test_a_failed_forward_leaves_nothing_to_go_on_from() -> None:
    scratch, model = scratch_of(num_places=1)
    forward, model.forward_and_keep = model.forward_and_keep, Mock(side_effect=RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        assert_right(scratch, FIRST, CHUNK)
    model.forward_and_keep = forward
    assert_right(scratch, FIRST, CHUNK)


@pytest.mark.parametrize(("num_places", "num_tokens"), [(1, MAX_TOKENS + 1), (0, 1)])
def test_what_does_not_fit_is_refused(num_places: int, num_tokens: int) -> None:
    scratch, _ = scratch_of(num_places)
    with pytest.raises(ValueError, match=f"no room for {num_tokens} tokens"):
        scratch.rows(np.zeros(num_tokens, dtype=np.int32), 0)
