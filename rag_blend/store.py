"""The chunk store: entries of one model and tenant in a storage backend. Anything doubtful is a miss."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from rag_blend.chunk import ChunkKV, ChunkOrigin, LayerKV, chunk_key, digest_json
from rag_blend.codecs import Codec, codec_of
from rag_blend.entry import EntryHeader, encode_entry, read_header, read_layer
from rag_blend.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    FingerprintMismatchError,
    StoreError,
    StoreUnavailableError,
)
from rag_blend.label import ListedChunk, label_of, read_label
from rag_blend.patience import DEADLINE_S, HangingStoreError, Patience
from rag_blend.storage import EntryReader, StorageBackend

logger = logging.getLogger(__name__)

_REMEMBERED_HEADERS = 2048
_WARNING_PAUSE_S = 60.0


class StoredChunk:
    """One entry opened for reading, its header checked.

    Args:
        key: The entry's key.
        header: Its header.
        reader: Its bytes; closed by `close`.
    """

    def __init__(self, key: str, header: EntryHeader, reader: EntryReader) -> None:
        self.key = key
        self.header = header
        self._reader = reader

    def layer(self, layer_idx: int) -> LayerKV:
        """One layer in the header's dtype, (num_kv_heads, num_tokens, head_dim) each; not to be written to.

        Raises:
            CorruptChunkError: The bytes are not what was written.
            OSError: The medium does not answer.
        """
        return read_layer(self._reader, self.header, layer_idx)

    def close(self) -> None:
        """Release the entry."""
        self._reader.close()

    def __enter__(self) -> StoredChunk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WrittenChunk(NamedTuple):
    """What `KVStore.put` did: the entry's key and its size in bytes."""

    key: str
    num_bytes: int


class KVStore:
    """Entries of one model (`fingerprint`) and one tenant (`namespace`).

    Args:
        backend: Where the bytes live.
        fingerprint: Digest of the model's `ModelFingerprint`.
        namespace: Tenant; set by the operator, never by the client of a service.
        kv_dtype: Dtype of stored keys and values.
        codec: How new entries are written down; those of other codecs are read as well.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: str,
        namespace: str,
        kv_dtype: torch.dtype,
        codec: str | Codec = "raw",
    ) -> None:
        self.backend = backend
        self.fingerprint = fingerprint
        self.namespace = namespace
        self._kv_dtype = kv_dtype
        self.codec = codec_of(codec)
        self.patience = Patience(None if backend.has_deadlines else DEADLINE_S)
        self._headers: OrderedDict[str, EntryHeader] = OrderedDict()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._warned_at = float("-inf")  # of a medium that does not answer; by `time.monotonic`

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each kind of trouble was met: ``missing``, ``corrupt``, ``foreign``, ``unavailable``."""
        with self._lock:
            return dict(self._counts)

    def origin(self, head: str, prime: str) -> ChunkOrigin:
        """The origin of a chunk cached behind this head and priming text (digests)."""
        return ChunkOrigin(self.fingerprint, self.namespace, head, prime)

    def key_of(self, origin: ChunkOrigin, token_ids: np.ndarray) -> str:
        """The key that such a chunk has."""
        return chunk_key(origin, token_ids)

    def put(self, chunk: ChunkKV) -> WrittenChunk:
        """Write a chunk.

        Raises:
            ValueError: A key or value is not finite.
            OSError: The medium refused.
        """
        key = chunk_key(chunk.origin, chunk.token_ids)
        data = encode_entry(chunk, self._kv_dtype, self.codec)
        self.backend.write(key, data, label_of(chunk.origin, chunk.token_ids))
        return WrittenChunk(key, len(data))

    def open(self, key: str) -> StoredChunk:
        """Open an entry of this model and tenant.

        Raises:
            ChunkNotFoundError: No such entry.
            CorruptChunkError: It is damaged; it has been set aside.
            FingerprintMismatchError: It belongs to another model or tenant.
            StoreUnavailableError: The medium does not answer.
        """
        try:
            return self.patience.run(partial(self._open, key), StoredChunk.close)
        except HangingStoreError as error:
            self.count_unavailable(key, error)
            raise StoreUnavailableError(f"{key[:12]}: {error}") from error
        except ChunkNotFoundError:
            self._count("missing")
            raise

    def places_of(self, keys: AbstractSet[str]) -> Mapping[str, str]:
        """The names of the places that entries would come from, by their keys; all the same where nobody can tell."""
        if not keys:
            return {}
        try:
            return self.patience.run(lambda: {key: self.backend.place_of(key) for key in keys}, lambda _: None)
        except OSError:
            return dict.fromkeys(keys, "")

    def discard_damaged(self, key: str, reason: Exception, level: int = logging.WARNING) -> None:
        """Set a damaged entry aside, count it and log it."""
        logger.log(level, "setting a damaged cache entry aside, it will be recomputed: %s", reason)
        self._count("corrupt")
        try:
            self.backend.quarantine(key)
        except OSError as error:
            self.count_unavailable(key, error, level)
        self._forget_header(key)

    def count_unavailable(self, key: str, reason: Exception, level: int = logging.WARNING) -> None:
        """Count and log an entry that the medium did not deliver; while that goes on, one warning a minute will do."""
        now = time.monotonic()
        with self._lock:
            if level == logging.WARNING and now - self._warned_at < _WARNING_PAUSE_S:
                level = logging.DEBUG
            elif level == logging.WARNING:
                self._warned_at = now
        said = str(reason)  # who keeps the record shall not keep the error's frames, and with them a prompt's layers
        logger.log(level, "cache entry %s cannot be read, it will be recomputed: %s", key[:12], said)
        self._count("unavailable")

    def has(self, key: str) -> bool:
        """Whether a readable entry of this model and tenant is there."""
        try:
            self._open(key).close()
        except StoreError:
            return False
        return True

    def token_ids(self, key: str) -> np.ndarray:
        """The ids of a stored chunk, int32.

        Raises:
            KeyError: There is no such chunk any more.
            StoreUnavailableError: The medium does not answer.
        """
        return self._remembered(key).token_ids

    def read_ahead(self, keys: Sequence[str]) -> Mapping[str, Exception]:
        """Have what `token_ids` will be asked for, where several reads at once are faster than one after the other.

        Returns:
            The keys for which it would raise, and what.
        """
        backend = self.backend  # calls of one without deadlines may hang, and threads left behind are to stay few
        with self._lock:
            unknown = [key for key in keys if key not in self._headers]
        if len(unknown) < 2 or backend.parallel_reads < 2 or not backend.has_deadlines:
            return {}
        with ThreadPoolExecutor(backend.parallel_reads, thread_name_prefix="rag-blend-fetch") as pool:
            errors = pool.map(self._why_not, unknown)
        return {key: error for key, error in zip(unknown, errors, strict=True) if error is not None}

    def _why_not(self, key: str) -> Exception | None:
        try:
            self._remembered(key)
        except (KeyError, StoreUnavailableError) as error:
            return error
        return None

    def is_lossless(self, key: str) -> bool:
        """Whether a stored chunk has what was computed, but for its 16 bits; False when it cannot be had."""
        try:
            return self._remembered(key).codec.lossless
        except (KeyError, StoreUnavailableError):
            return False

    def scan(self, any_model: bool = False) -> Iterator[ListedChunk]:
        """All entries of this model and tenant; others are counted and skipped.

        An entry is opened only if the backend has lost its label, so a damaged one may be listed.

        Args:
            any_model: Those of the tenant's other models as well.
        """
        try:
            yield from self._scan(any_model)
        except OSError as error:
            logger.warning("not all stored cache entries could be listed: %s", error)
            self._count("unavailable")

    def link(self, document: str, keys: Iterable[str]) -> None:
        """Record which entries a document of this tenant needs."""
        self.backend.link(self._document(document), keys)

    def forget(self, documents: AbstractSet[str], primes: AbstractSet[str] = frozenset()) -> list[str]:
        """Delete the entries that only these documents need, and those primed with one of these texts.

        Args:
            documents: Documents of this tenant.
            primes: Digests of priming texts; entries of all the tenant's models count.

        Returns:
            Keys of the entries, sorted.

        Raises:
            OSError: The medium refused. Nothing is forgotten that calling again would need.
        """
        # The table comes last: on a full medium it cannot be changed before something was deleted.
        names = {self._document(document) for document in documents}
        keys = {*self.backend.needed_only_by(names), *self._primed_with(primes)}
        for key in sorted(keys):
            self._forget_header(key)
            self.backend.delete(key)
        self.backend.unlink(names)
        return sorted(keys)

    def entries_of(self, documents: AbstractSet[str]) -> set[str]:
        """Keys of the entries that are there for these documents of this tenant, and for no others."""
        names = {self._document(document) for document in documents}
        return set(self.backend.needed_only_by(names)).intersection(self.backend.keys())

    def record_name(self, *parts: str) -> str:
        """Name of a small record of this model and tenant."""
        return digest_json([self.fingerprint, self.namespace, *parts])

    def _primed_with(self, primes: AbstractSet[str]) -> list[str]:
        if not primes:
            return []
        return [chunk.key for chunk in self._scan(any_model=True) if chunk.origin.prime in primes]

    def _scan(self, any_model: bool) -> Iterator[ListedChunk]:
        """Like `scan`, but a listing that breaks off is an OSError."""
        unreadable = 0
        for key, label in self.backend.labels():
            try:
                yield self._listed(key, label, any_model)
            except (ChunkNotFoundError, FingerprintMismatchError):
                continue
            except StoreError:
                unreadable += 1
        if unreadable:  # one line, however many: a store is opened again and again
            logger.warning("%d stored cache entries cannot be read, they will be recomputed", unreadable)

    def _listed(self, key: str, label: bytes, any_model: bool) -> ListedChunk:
        described = read_label(label, key)
        if described is None:
            with self._open(key, any_model, logging.DEBUG) as stored:
                return ListedChunk(key, stored.header.origin, stored.header.token_ids)
        self._refuse_foreign(described.origin, any_model)
        return described

    def _open(self, key: str, any_model: bool = False, level: int = logging.WARNING) -> StoredChunk:
        try:
            reader = self.backend.open(key)
            try:
                header = self._header(reader, key)
                self._refuse_foreign(header.origin, any_model)
            except BaseException:
                reader.close()
                raise
        except CorruptChunkError as error:
            self.discard_damaged(key, error, level)
            raise
        except OSError as error:
            self.count_unavailable(key, error, level)
            raise StoreUnavailableError(f"{key[:12]}: {error}") from error
        return StoredChunk(key, header, reader)

    def _header(self, reader: EntryReader, key: str) -> EntryHeader:
        try:
            return read_header(reader, key, self.codec)
        except FingerprintMismatchError:  # of a codec that is not known here
            self._count("foreign")
            raise

    def _remembered(self, key: str) -> EntryHeader:
        """A stored chunk's header, for questions that are asked again and again; see `token_ids`."""
        with self._lock:
            if key in self._headers:
                self._headers.move_to_end(key)
                return self._headers[key]
        try:
            stored = self.open(key)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise KeyError(key) from error
        stored.close()
        with self._lock:
            self._headers[key] = stored.header
            if len(self._headers) > _REMEMBERED_HEADERS:
                self._headers.popitem(last=False)
        return stored.header

    def _forget_header(self, key: str) -> None:
        with self._lock:
            self._headers.pop(key, None)

    def _document(self, document: str) -> str:
        return json.dumps([self.namespace, document])  # no choice of names makes two tenants' documents meet

    def _refuse_foreign(self, origin: ChunkOrigin, any_model: bool) -> None:
        if origin.namespace != self.namespace or not (any_model or origin.fingerprint == self.fingerprint):
            self._count("foreign")
            raise FingerprintMismatchError("made by another model, tokenizer or dtype, or for another tenant")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1
