"""Rows as they are, in the stored dtype: the fastest to read, and the format that stock safetensors understands."""

from __future__ import annotations

import math

import torch

from rag_blend.codecs.base import Codec, Shape


class RawCodec(Codec):
    """Nothing but the bytes of the layer."""

    name = "raw"

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """See `Codec.encode`."""
        return layer.view(torch.uint8).flatten()

    def decode(self, data: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        return data.view(dtype).view(shape)

    def sizes(self, shape: Shape, dtype: torch.dtype) -> range:
        """See `Codec.sizes`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return range(num_bytes, num_bytes + 1)
