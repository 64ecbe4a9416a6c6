"""Where rows lie: a prompt's own memory, or seats side by side."""

from __future__ import annotations

import torch

from rag_blend.chunk import LayerKV
from rag_blend.space import OwnSpace, SharedSpace


def rows(num_tokens: int) -> LayerKV:
    return LayerKV(torch.randn(1, 2, num_tokens, 8), torch.randn(1, 2, num_tokens, 4))


def test_there_is_room_behind_a_prompt() -> None:
    taken = OwnSpace(3).take(0, rows(5))
    assert [side.shape for side in taken] == [(1, 2, 8, 8), (1, 2, 8, 4)]
    assert [side.shape for side in OwnSpace().take(0, rows(5))] == [(1, 2, 5, 8), (1, 2, 5, 4)]


def test_those_that_sit_together_end_together() -> None:
    space = SharedSpace(3, longest=6, room=2)
    written = [rows(4), rows(6)]
    for layer_idx in (1, 0):
        for index, own in enumerate(written):
            for taken, side in zip(space.seat(index).take(layer_idx, own), own, strict=True):
                assert taken.shape[2] == side.shape[2] + 2
                taken[:, :, : side.shape[2]] = side + layer_idx
    for layer_idx, layer in enumerate(space.first(2)):
        for index, own in enumerate(written):
            for whole, side in zip(layer, own, strict=True):
                start = 6 - side.shape[2]
                assert len(whole) == 2
                assert torch.equal(whole[index, :, start:6], side[0] + layer_idx)
                assert not whole[index, :, :start].any()


def test_a_seat_is_left_clean_for_a_shorter_prompt() -> None:
    space = SharedSpace(1, longest=6, room=0)
    for side in space.seat(0).take(0, rows(6)):
        side.fill_(torch.nan)
    for side in space.seat(0).take(0, rows(4)):
        side.fill_(1.0)
    assert all(torch.equal(side[0, :, :2], torch.zeros_like(side[0, :, :2])) for side in space.first(1)[0])
    assert not any(side.isnan().any() for side in space.first(1)[0])
