"""What tells an entry's origin and token ids without opening it: for listing a store."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from rag_blend.chunk import ChunkOrigin, chunk_key


class ListedChunk(NamedTuple):
    """An entry's key, its origin and its token ids, int32, shape (num_tokens,)."""

    key: str
    origin: ChunkOrigin
    token_ids: np.ndarray


def label_of(origin: ChunkOrigin, token_ids: np.ndarray) -> bytes:
    """The label: a line of JSON, then the ids as little-endian int32."""
    return json.dumps(astuple(origin)).encode("ascii") + b"\n" + np.asarray(token_ids, dtype="<i4").tobytes()


def read_label(label: bytes, key: str) -> ListedChunk | None:
    """What a label says; None when it is lost or not that of the entry `key`."""
    first, _, rest = label.partition(b"\n")
    try:
        origin = ChunkOrigin(*json.loads(first))
        ids = np.frombuffer(rest, dtype="<i4")
        return ListedChunk(key, origin, ids) if chunk_key(origin, ids) == key else None
    except (ValueError, TypeError, RecursionError):
        return None
