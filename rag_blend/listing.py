"""From a store to a catalog of those of its chunks that prompts may use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from rag_blend.catalog import ChunkCatalog
from rag_blend.chunk import NO_TOKENS
from rag_blend.ingest import read_head
from rag_blend.label import ListedChunk
from rag_blend.primer import Primer
from rag_blend.store import KVStore


def empty_catalog(store: KVStore, primer: Primer, any_head: bool = False) -> ChunkCatalog:
    """A catalog that asks the store for ids of chunks and heads; `any_head`: see `ChunkCatalog`."""
    unprimed_key_of = partial(_unprimed_key, store) if primer.keeps_copies else None
    return ChunkCatalog(store.token_ids, partial(_head_ids, store), any_head, unprimed_key_of, store.read_ahead)


def usable_chunks(store: KVStore, primer: Primer) -> Iterator[ListedChunk]:
    """What is stored of heads, and of chunks that were primed in a way that the primer accepts."""
    for chunk in store.scan():
        origin = chunk.origin
        if origin.is_head or primer.accepts(origin.prime):
            yield chunk


def _unprimed_key(store: KVStore, head: str, token_ids: np.ndarray) -> str:
    return store.key_of(store.origin(head, NO_TOKENS), token_ids)


def _head_ids(store: KVStore, digest: str) -> np.ndarray:
    if digest == NO_TOKENS:
        return np.empty(0, dtype=np.int32)
    ids = read_head(store, digest)
    if ids is None:
        raise KeyError(digest)
    return ids
