"""What tells an entry's origin and token ids without opening it: for listing a store."""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from rag_blend.chunk import FORMAT, ChunkOrigin, chunk_key

_CHECKSUM_BYTES = 16


class ListedChunk(NamedTuple):
    """An entry's key, its origin and its token ids, int32, shape (num_tokens,)."""

    key: str
    origin: ChunkOrigin
    token_ids: np.ndarray


def label_of(origin: ChunkOrigin, token_ids: np.ndarray) -> bytes:
    """The label: the origin as a line of JSON, the ids as little-endian int32, and a checksum of both and the key."""
    said = json.dumps(astuple(origin)).encode("ascii") + b"\n" + np.asarray(token_ids, dtype="<i4").tobytes()
    return said + _checksum(said, chunk_key(origin, token_ids))


def read_label(label: bytes, key: str) -> ListedChunk | None:
    """What a label says; None when it is lost or not that of the entry `key`."""
    said = memoryview(label)[:-_CHECKSUM_BYTES]
    start = label.find(b"\n") + 1
    try:
        origin = _read_origin(label[:start])
        if _checksum(said, key) == label[-_CHECKSUM_BYTES:]:
            return ListedChunk(key, origin, np.frombuffer(said[start:], dtype="<i4"))
        ids = np.frombuffer(label[start:], dtype="<i4")  # of a label without a checksum, as they were at first
        return ListedChunk(key, origin, ids) if chunk_key(origin, ids) == key else None
    except (ValueError, TypeError, RecursionError):
        return None


@lru_cache(maxsize=64)  # a store has many chunks, but few heads and priming texts
def _read_origin(line: bytes) -> ChunkOrigin:
    return ChunkOrigin(*json.loads(line))


def _checksum(said: bytes | memoryview, key: str) -> bytes:
    """Guards against damage, not against forgers: an entry that a prompt uses is opened and compared with its key."""
    digest = xxhash.xxh3_128(f"{FORMAT} {key}".encode("ascii"))
    digest.update(said)
    return digest.digest()
