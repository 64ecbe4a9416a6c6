"""Lossless: the bytes that hold the exponents are compressed, those of the mantissas are noise and stay as they are.

So keys and values shrink by some 30 % in bfloat16 and 14 % in float16, and no layer to less than half its size: there
is nothing that a few bytes could blow up to.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from rag_blend.codecs.base import Codec, Shape
from rag_blend.errors import install_hint

try:
    import zstandard
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('zstd')}", name=missing.name) from None

_LEVEL = 1  # higher ones take several times as long and save nothing
_LEAST_WINDOW = 1 << 10  # zstd knows no smaller limit


class ZstdCodec(Codec):
    """The low bytes of all 16-bit words, then their high bytes as one zstd frame."""

    name = "zstd"

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """See `Codec.encode`."""
        pairs = layer.view(torch.uint8).numpy().reshape(-1, 2)  # little-endian: low, high
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(pairs[:, 1].tobytes())
        return torch.from_numpy(np.concatenate([pairs[:, 0], np.frombuffer(frame, np.uint8)]))

    def decode(self, data: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        num_words = _num_words(shape, dtype)
        stored = data.numpy()
        high = np.frombuffer(_decompressed(stored[num_words:].data, num_words), np.uint8)
        words = np.empty(num_words, np.uint16)
        # Shifting makes whole words three times as fast as writing every other byte.
        np.left_shift(high, 8, out=words, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(words, stored[:num_words], out=words)
        return torch.from_numpy(words).view(dtype).view(shape)

    def sizes(self, shape: Shape, dtype: torch.dtype) -> range:
        """See `Codec.sizes`."""
        num_words = _num_words(shape, dtype)
        return range(num_words + 1, 2 * num_words + num_words // 128 + 64)  # zstd's own bound is tighter


def _num_words(shape: Shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize // 2


def _decompressed(frame: memoryview, num_bytes: int) -> bytes:
    """What the frame holds, which must be so many bytes."""
    try:
        told = zstandard.get_frame_parameters(frame).content_size
        if told != num_bytes:  # zstandard would allocate what the frame says
            raise ValueError(f"a frame of {told} bytes instead of {num_bytes}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(num_bytes, _LEAST_WINDOW))
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
