"""Numbers of a few bits: a group of values has a lowest one and a step, and each value is so many steps above it.

Keys are grouped over the tokens of a channel, values over the channels of a token, as in KIVI (arXiv 2402.02750): keys
have channels that are large for all tokens. Lowest value and step are float16; they are rounded before the numbers are
chosen, so that the numbers make up for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from rag_blend.codecs.base import Codec, Shape

# By numpy: torch would share these small operations among its threads, which takes longer while the model needs them.
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
_KEY_AXIS, _VALUE_AXIS = 1, 2  # of (num_kv_heads, num_tokens, head_dim)
_Index = tuple[slice, ...]


class AffineCodec(Codec):
    """Lowest values and steps of all keys, those of all values, then the numbers. Decodes to float32.

    A value is off by at most half a step. A step is the spread of its group, and a thousandth of the lowest value for
    rounding that, divided by ``2**bits - 1``; it is never less than float16's smallest number.

    Attributes:
        bits: Of a number.
        group: So many values share a lowest one and a step; the last group of a row may be smaller.
    """

    lossless = False
    bits: ClassVar[int]
    group: ClassVar[int]

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """See `Codec.encode`."""
        values = layer.numpy()
        numbers = np.empty(values.shape, np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large shows in the scales
            of_keys = self._quantise(values[0], _KEY_AXIS, numbers[0])
            of_values = self._quantise(values[1], _VALUE_AXIS, numbers[1])
        scales = np.concatenate([of_keys.ravel(), of_values.ravel()])
        if not np.isfinite(scales).all():
            raise ValueError("keys or values are too large to be stored")
        return torch.from_numpy(np.concatenate([scales.view(np.uint8), self.pack(numbers).ravel()]))

    def decode(self, data: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        key_shape, value_shape = self._scale_shapes(shape)
        num_keys, num_scales = math.prod(key_shape), math.prod(key_shape) + math.prod(value_shape)
        stored: Bytes = data.numpy()
        scales = stored[: 2 * num_scales].view(np.float16).astype(np.float32)
        if not np.isfinite(scales).all():
            raise ValueError("scales are not finite")
        layer = self.unpack(stored[2 * num_scales :], shape).astype(np.float32)
        self._scale(layer[0], _KEY_AXIS, scales[:num_keys].reshape(key_shape))
        self._scale(layer[1], _VALUE_AXIS, scales[num_keys:].reshape(value_shape))
        return torch.from_numpy(layer)

    def sizes(self, shape: Shape, dtype: torch.dtype) -> range:
        """See `Codec.sizes`; empty for a dtype that is never written."""
        if dtype != torch.float32:
            return range(0)
        num_bytes = 2 * sum(map(math.prod, self._scale_shapes(shape))) + math.prod(shape) * self.bits // 8
        return range(num_bytes, num_bytes + 1)

    def pack(self, numbers: Bytes) -> Bytes:
        """Numbers as bytes: (2, num_kv_heads, num_tokens, head_dim) to any shape."""
        return numbers

    def unpack(self, data: Bytes, shape: Shape) -> Bytes:
        """The reverse; `data` is flat and must not be written to."""
        return data.reshape(shape)

    @property
    def _levels(self) -> int:
        return (1 << self.bits) - 1

    def _quantise(self, side: Floats, axis: int, numbers: Bytes) -> Halves:
        """Fills `numbers`; returns lowest values and steps."""
        scales = np.empty(self._scale_shape(side.shape, axis), np.float16)
        for rows, groups, length in _blocks(side.shape[axis], axis, self.group):
            values = _grouped(side[rows], axis, length)
            lowest = values.min(axis + 1, keepdims=True)
            # Rounded down, or there would be values below it. The step may be rounded down: that makes 255 steps short
            # by an eighth of one at most. But never to 0: 2**-24 is float16's smallest number.
            scales[0][groups] = lowest - np.abs(lowest) * np.float32(2**-10)
            lowest = scales[0][groups].astype(np.float32)
            spread = values.max(axis + 1, keepdims=True) - lowest
            scales[1][groups] = spread / self._levels + np.float32(2**-24)
            steps = (values - lowest) / scales[1][groups].astype(np.float32)
            _grouped(numbers[rows], axis, length)[...] = np.rint(steps, out=steps)
        return scales

    def _scale(self, side: Floats, axis: int, scales: Floats) -> None:
        """Turns numbers into the values they stand for, in place."""
        lowest, step = scales
        for rows, groups, length in _blocks(side.shape[axis], axis, self.group):
            values = _grouped(side[rows], axis, length)
            values *= step[groups]
            values += lowest[groups]

    def _scale_shapes(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._scale_shape(shape[1:], _KEY_AXIS), self._scale_shape(shape[1:], _VALUE_AXIS)

    def _scale_shape(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Of the lowest values and steps together: the axis becomes the groups, and one for what is in them."""
        return 2, *shape[:axis], -(-shape[axis] // self.group), 1, *shape[axis + 1 :]


def _grouped(array: npt.NDArray[Any], axis: int, length: int) -> npt.NDArray[Any]:
    """A view in which an axis is split into groups and what is in them."""
    return array.reshape(*array.shape[:axis], -1, length, *array.shape[axis + 1 :])


def _blocks(size: int, axis: int, group: int) -> Iterator[tuple[_Index, _Index, int]]:
    """The whole groups of an axis together, then the smaller one left: where the values are, the scales, its length."""
    before = (slice(None),) * axis
    whole = size // group
    if whole:
        yield (*before, slice(0, whole * group)), (*before, slice(0, whole)), group
    if size % group:
        yield (*before, slice(whole * group, size)), (*before, slice(whole, None)), size % group
