"""Where a prompt's rows lie: in memory of their own, or among those of the prompts that will be decoded with it."""

from __future__ import annotations

from typing import Protocol

import torch

from rag_blend.chunk import LayerKV


class Space(Protocol):
    """Memory for the rows of one prompt, and for those that are decoded behind it."""

    def take(self, layer_idx: int, like: LayerKV) -> LayerKV:
        """Room for a layer; what is in it is undefined.

        Args:
            layer_idx: Which layer.
            like: Of the shape, (batch, num_kv_heads, num_tokens, head_dim) each, type and device of the prompt's rows.

        Returns:
            The same with more tokens: (batch, num_kv_heads, num_tokens + room, head_dim) each.
        """


class OwnSpace:
    """Memory for one prompt alone.

    Args:
        room: How many tokens may be decoded.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room

    def take(self, layer_idx: int, like: LayerKV) -> LayerKV:
        """See `Space.take`."""
        return LayerKV(*(_resized(side, len(side), side.shape[2] + self._room) for side in like))


class SharedSpace:
    """Memory for several prompts, of which all end at the same place, as `generate` wants them.

    Args:
        count: How many prompts.
        longest: Tokens of the longest.
        room: How many tokens may be decoded.

    Attributes:
        longest: As given.
    """

    def __init__(self, count: int, longest: int, room: int) -> None:
        self._count = count
        self.longest = longest
        self._room = room
        self._layers: dict[int, LayerKV] = {}

    def seat(self, index: int) -> Space:
        """The space of one of the prompts; who takes it again writes over what is there."""
        return _Seat(self, index)

    def layer(self, layer_idx: int, like: LayerKV) -> LayerKV:
        """A layer's rows of all prompts, (count, num_kv_heads, longest + room, head_dim) each."""
        if layer_idx not in self._layers:
            length = self.longest + self._room
            self._layers[layer_idx] = LayerKV(*(_resized(side, self._count, length) for side in like))
        return self._layers[layer_idx]

    def first(self, count: int) -> list[LayerKV]:
        """All layers of the first `count` prompts."""
        return [LayerKV(kv.keys[:count], kv.values[:count]) for _, kv in sorted(self._layers.items())]


class _Seat:
    def __init__(self, shared: SharedSpace, index: int) -> None:
        self._shared = shared
        self._row = slice(index, index + 1)

    def take(self, layer_idx: int, like: LayerKV) -> LayerKV:
        start = self._shared.longest - like.keys.shape[2]
        mine = [side[self._row] for side in self._shared.layer(layer_idx, like)]
        for side in mine:
            side[:, :, :start] = 0.0  # nobody looks there, but a NaN would show nevertheless
        return LayerKV(*(side[:, :, start:] for side in mine))


def copied(rows: LayerKV, space: Space, layer_idx: int) -> LayerKV:
    """A layer's rows, (batch, num_kv_heads, num_tokens, head_dim) each, in a space, with what room that leaves."""
    taken = space.take(layer_idx, rows)
    for target, side in zip(taken, rows, strict=True):
        target[:, :, : side.shape[2]] = side
    return taken


def _resized(like: torch.Tensor, count: int, length: int) -> torch.Tensor:
    _, heads, _, head_dim = like.shape
    return like.new_empty((count, heads, length, head_dim))
