"""Chunks for the tests of the storage half: small, random, always the same."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch

from rag_blend.chunk import NO_TOKENS, ChunkKV, ChunkOrigin, LayerKV

ORIGIN = ChunkOrigin("fingerprint", "tenant", NO_TOKENS, NO_TOKENS)
HEADS, TOKENS, HEAD_DIM, LAYERS = 2, 24, 8, 3


def token_ids(seed: int, num_tokens: int = TOKENS) -> np.ndarray:
    """Random ids."""
    return np.random.default_rng(seed).integers(5, 500, num_tokens).astype(np.int32)


def random_chunk(
    seed: int = 0,
    origin: ChunkOrigin = ORIGIN,
    dtype: torch.dtype = torch.float32,
    num_tokens: int = TOKENS,
    num_layers: int = LAYERS,
    num_heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> ChunkKV:
    """A chunk whose values `dtype` can represent."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, 2, num_heads, num_tokens, head_dim)
    values = torch.randn(shape, generator=generator).to(dtype).float()
    staleness = np.random.default_rng(seed).random(num_tokens).astype(np.float16)
    return ChunkKV(origin, token_ids(seed, num_tokens), [LayerKV(*layer) for layer in values], staleness)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and the rest of a safetensors file."""
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Any, rest: bytes) -> bytes:
    """The reverse of `split`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest
