"""Entries in this process's memory: for tests, notebooks and small collections."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, checked_key


class _MemoryReader(EntryReader):
    def __init__(self, data: Bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self.size:
            raise CorruptChunkError(f"entry has {self.size} bytes, {offset + length} were expected")
        return self._data[offset : offset + length]

    def close(self) -> None:
        return None


class MemoryBackend(StorageBackend):
    """A dictionary of entries. They live as long as this object."""

    def __init__(self) -> None:
        self._entries: dict[str, Bytes] = {}
        self._labels: dict[str, bytes] = {}
        self._records: dict[str, bytes] = {}
        self._needs: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, rest: str) -> MemoryBackend:
        """`memory://` takes no further words."""
        if rest:
            raise ValueError(f"memory:// takes nothing after it, got {rest!r}")
        return cls()

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`."""
        with self._lock:
            self._entries[checked_key(key)] = np.frombuffer(bytearray(data), dtype=np.uint8)
            self._labels[key] = bytes(label)

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`."""
        with self._lock:
            data = self._entries.get(checked_key(key))
        if data is None:
            raise ChunkNotFoundError(key)
        return _MemoryReader(data)

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        with self._lock:
            self._labels.pop(checked_key(key), None)
            return self._entries.pop(key, None) is not None

    def quarantine(self, key: str) -> None:
        """Drops the entry: memory has no place for evidence."""
        self.delete(key)

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`."""
        with self._lock:
            return iter(list(self._entries))

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """See `StorageBackend.labels`."""
        with self._lock:
            return iter(list(self._labels.items()))

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        with self._lock:
            self._needs[document].update(keys)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        with self._lock:
            theirs = set[str]().union(*(self._needs[document] for document in documents & self._needs.keys()))
            return sorted(theirs.difference(*(keys for name, keys in self._needs.items() if name not in documents)))

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        with self._lock:
            for document in documents:
                self._needs.pop(document, None)

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        return self._records.get(checked_key(name))

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`."""
        return iter(list(self._records))

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        self._records.setdefault(checked_key(name), bytes(data))

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        self._records.pop(checked_key(name), None)
