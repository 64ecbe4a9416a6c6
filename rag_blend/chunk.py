"""The nouns: one layer's keys and values, one chunk's cache, what it belongs to, and its key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import torch

FORMAT = "rag_blend.kv/2"
GENERIC_HEAD = "any"  # the head digest of chunks that were cached without knowing the prompt's head


class LayerKV(NamedTuple):
    """Keys and values of one layer, each of shape ([batch,] num_kv_heads, num_tokens, head_dim).

    What is stored has keys **before** RoPE (and after any k_norm), so that they can be put at any position; what a
    model's cache holds has them after RoPE. Each use says which.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What decides whether a stored cache is this model's: contents, never names or paths.

    Attributes:
        weights: Digest of all parameters.
        config: Digest of the configuration, RoPE parameters included.
        tokenizer: Digest of the tokenizer.
        compute_dtype: Dtype in which the model ran, e.g. ``"float32"``.
        kv_dtype: Dtype in which keys and values are stored.
    """

    weights: str
    config: str
    tokenizer: str
    compute_dtype: str
    kv_dtype: str

    @property
    def digest(self) -> str:
        """Hex sha256 over all fields."""
        return digest_json(asdict(self))


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """Where a cache comes from, apart from the chunk's own tokens.

    Attributes:
        fingerprint: Digest of the `ModelFingerprint`.
        namespace: Tenant; entries of different namespaces never meet.
        head: Digest of the token ids in front, or `GENERIC_HEAD`.
        prime: Digest of the priming token ids between head and chunk, behind a word and a blank where they are the
            chunk's own (`Priming.kind`).
    """

    fingerprint: str
    namespace: str
    head: str
    prime: str

    @property
    def is_head(self) -> bool:
        """Whether the chunk is the head of prompts itself: it was cached behind nothing at all."""
        return self.head == self.prime == NO_TOKENS

    @property
    def priming(self) -> Literal["none", "shared", "own"]:
        """Whether the priming text is one for all chunks, or was chosen for this one."""
        if self.prime == NO_TOKENS:
            return "none"
        return "own" if " " in self.prime else "shared"


class Context(NamedTuple):
    """What chunks are prefilled behind.

    Attributes:
        token_ids: Head and priming text, int32, shape (num_tokens,); may be empty.
        weight: Its weight in the mean over contexts.
    """

    token_ids: np.ndarray
    weight: float


class ChunkKV(NamedTuple):
    """The whole cache of one chunk.

    Attributes:
        origin: What the cache was computed with.
        token_ids: The chunk's own ids, int32, shape (num_tokens,).
        layers: One `LayerKV` per layer, keys before RoPE.
        staleness: How far each token's keys and values depend on what stood in front of the chunk, as far as is known:
            their variance over contexts relative to their mean square, float16, shape (num_tokens,). None: unknown.
    """

    origin: ChunkOrigin
    token_ids: np.ndarray
    layers: Sequence[LayerKV]
    staleness: np.ndarray | None = None


def digest_json(value: object) -> str:
    """Hex sha256 of the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def digest_ids(token_ids: Sequence[int] | np.ndarray) -> str:
    """Hex sha256 of a sequence of token ids."""
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    return hashlib.sha256(ids.tobytes()).hexdigest()


NO_TOKENS = digest_ids([])
_ORIGIN = tuple(field.name for field in fields(ChunkOrigin))


def chunk_key(origin: ChunkOrigin, token_ids: Sequence[int] | np.ndarray) -> str:
    """The name of an entry: hex sha256 over its origin and its token ids.

    The document's id is deliberately not part of it: the same text in two documents is stored once.
    """
    said = {name: getattr(origin, name) for name in _ORIGIN}  # asdict would copy, and a store has many
    return digest_json({"format": FORMAT, "ids": digest_ids(token_ids), **said})
