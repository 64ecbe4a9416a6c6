"""Entries in this process's memory: for tests, notebooks and small collections, and in front of slower tiers."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.sizes import parse_bytes
from rag_blend.storage._fork import repair_after_fork
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, StorageStats, checked_key


class BytesReader(EntryReader):
    """An entry whose bytes are in memory."""

    def __init__(self, data: Bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, offset: int, length: int) -> Bytes:
        """See `EntryReader.read`."""
        if offset + length > self.size:
            raise CorruptChunkError(f"entry has {self.size} bytes, {offset + length} were expected")
        return self._data[offset : offset + length]

    def close(self) -> None:
        """See `EntryReader.close`."""
        return None


class _Entry(NamedTuple):
    data: Bytes
    label: bytes


class MemoryBackend(StorageBackend):
    """A dictionary of entries. They live as long as this object, or until the quota has no room for them.

    When it is full, the entries that were not used for longest go. Who reads one of them keeps its bytes until it is
    done, so for that long they take up memory beside the quota.

    Args:
        quota_bytes: What all entries together may take up; None: no limit. Labels and records do not count.
    """

    durable = False
    has_deadlines = True

    def __init__(self, quota_bytes: int | None = None) -> None:
        if quota_bytes is not None and quota_bytes < 1:
            raise ValueError(f"a quota of {quota_bytes} bytes has room for nothing")
        self.quota_bytes = quota_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one used last stands last
        self._bytes = 0
        self._evicted = 0
        self._records: dict[str, bytes] = {}
        self._needs: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()
        repair_after_fork(self)

    @classmethod
    def from_url(cls, rest: str) -> MemoryBackend:
        """`memory://`, or `memory://?quota=512MB`."""
        options = dict(parse_qsl(rest[1:], keep_blank_values=True)) if rest.startswith("?") else {}
        if rest and options.keys() != {"quota"}:
            raise ValueError(f"memory:// knows the option quota, as in memory://?quota=512MB, but not {rest!r}")
        return cls(parse_bytes(options["quota"]) if options else None)

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`.

        Raises:
            OSError: The entry is larger than the quota.
        """
        checked_key(key)
        if self.quota_bytes is not None and len(data) > self.quota_bytes:
            what = f"an entry of {len(data):,} bytes is larger than the memory quota of {self.quota_bytes:,} bytes"
            raise OSError(errno.ENOSPC, what)
        entry = _Entry(np.frombuffer(bytearray(data), dtype=np.uint8), bytes(label))  # writable: torch wants it so
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self._bytes += len(data)
            while self.quota_bytes is not None and self._bytes > self.quota_bytes:
                self._drop(next(iter(self._entries)))
                self._evicted += 1

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`."""
        checked_key(key)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise ChunkNotFoundError(key)
            self._entries.move_to_end(key)
        return BytesReader(entry.data)

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        checked_key(key)
        with self._lock:
            return self._drop(key)

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
            return iter([(key, entry.label) for key, entry in self._entries.items()])

    def stats(self) -> StorageStats:
        """See `StorageBackend.stats`. Counts ``evicted``: entries that had to make room."""
        with self._lock:
            return StorageStats(len(self._entries), self._bytes, self.quota_bytes, {"evicted": self._evicted})

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        with self._lock:
            self._needs[document].update(keys)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        with self._lock:
            theirs = set[str]().union(*(self._needs[document] for document in documents & self._needs.keys()))
            return sorted(theirs.difference(*(keys for name, keys in self._needs.items() if name not in documents)))

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `StorageBackend.needed_by_others`."""
        with self._lock:
            others = (needed for name, needed in self._needs.items() if name not in documents)
            return set(keys & set[str]().union(*others))

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        with self._lock:
            for document in documents:
                self._needs.pop(document, None)

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """See `StorageBackend.documents`."""
        with self._lock:
            return iter([(document, sorted(keys)) for document, keys in self._needs.items() if keys])

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

    def after_fork(self) -> None:
        """See `Forkable`. A thread that is gone may have been in the middle of a write."""
        self._lock = threading.Lock()
        self._bytes = sum(len(entry.data) for entry in self._entries.values())

    def _drop(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        self._bytes -= len(entry.data) if entry else 0
        return entry is not None
