"""What every place that can hold entries must offer: whole bytes in, ranges of bytes out."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from rag_blend.errors import ChunkNotFoundError

Bytes = npt.NDArray[np.uint8]
_KEY = re.compile(r"[0-9a-f]{64}")


def checked_key(name: str) -> str:
    """Returns `name` if it is a possible key or record name: 64 lower-case hex digits.

    Raises:
        ValueError: It is not.
    """
    if not _KEY.fullmatch(name):  # nothing else ever becomes the name of a file or of a remote object
        raise ValueError(f"not a key: {name!r}")
    return name


class EntryReader(ABC):
    """One entry opened for reading. Stays readable when the entry is deleted meanwhile."""

    size: int

    @abstractmethod
    def read(self, offset: int, length: int) -> Bytes:
        """Read exactly `length` bytes from `offset`. The array may be shared: do not write to it.

        Raises:
            CorruptChunkError: The entry ends before `offset + length`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the entry; reading afterwards is an error."""

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class StorageStats:
    """What a backend holds.

    Attributes:
        entries: Number of entries.
        bytes: Their size together.
        quota_bytes: What they may take up; None: no limit of ours.
        counts: How often something noteworthy happened in this process, by name: ``evicted``, ``timeout``, …
        tiers: The same of each tier, by name, nearest first; empty when there is only one.
    """

    entries: int
    bytes: int
    quota_bytes: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, StorageStats] = field(default_factory=dict)


class StorageBackend(ABC):
    """Entries under keys (64 hex digits), small records, which documents need which keys. Knows no tensors.

    Every method may raise OSError when the medium does not answer, and ValueError for what cannot be a key.
    Implementations are safe to use from several threads. An entry is whole or absent: `write` publishes it in one
    step, and readers never see half of it.

    Attributes:
        parallel_reads: How many reads of different entries are worth having under way at once.
        durable: Whether what is written outlives the process.
        has_deadlines: Whether every call ends in time whatever the medium does. Others are given up when they hang.
    """

    parallel_reads: int = 1
    durable: bool = True
    has_deadlines: bool = False

    @abstractmethod
    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """Publish `data` under `key`, replacing what is there, atomically and durably.

        Args:
            key: The entry's key.
            data: The entry.
            label: Some kilobytes that describe it, for `labels`.

        Raises:
            OSError: The medium refused; nothing has changed.
        """

    @abstractmethod
    def open(self, key: str) -> EntryReader:
        """Open an entry for reading.

        Raises:
            ChunkNotFoundError: No such entry.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove an entry, and what `quarantine` kept of it; returns whether the entry was there."""

    @abstractmethod
    def quarantine(self, key: str) -> None:
        """Take a damaged entry out of the way, so that it is never read again and can be written anew."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """All keys present, in no particular order."""

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """All keys present, each with its label: what makes listing cheaper than opening every entry.

        A label may be lost: b"" stands for one that is not known. It is not proof of anything: check it.
        """
        for key in self.keys():
            yield key, b""

    def stats(self) -> StorageStats:
        """What is stored, counted now."""
        sizes = list(self._sizes())
        return StorageStats(len(sizes), sum(sizes))

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start to bring these entries nearer, if there is a nearer place. Returns at once; no error is raised."""
        return None

    def place_of(self, key: str) -> str:
        """Name of the place that an entry would come from: how fast that is, differs between places. Does not wait."""
        return type(self).__name__.removesuffix("Backend").lower()

    def limit_calls(self, seconds: float) -> None:
        """From now on no call shall take longer than this, however long was allowed before; local media ignore it."""
        return None

    @abstractmethod
    def link(self, document: str, keys: Iterable[str]) -> None:
        """Record that `document` needs the entries `keys`."""

    @abstractmethod
    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """The keys that these documents need and no other does, sorted. Writes nothing: a full medium may be freed."""

    @abstractmethod
    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """Those of `keys` that some document which is not among `documents` needs."""

    @abstractmethod
    def unlink(self, documents: AbstractSet[str]) -> None:
        """Forget what these documents need. The entries themselves stay."""

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """All documents, each with the keys it needs.

        Raises:
            OSError: It is not kept under the documents' names.
        """
        raise OSError(f"{type(self).__name__} cannot list its documents")

    @abstractmethod
    def get_record(self, name: str) -> bytes | None:
        """A small record by its name (64 hex digits), or None."""

    @abstractmethod
    def records(self) -> Iterator[str]:
        """The names of all small records, in no particular order; they may be deleted meanwhile."""

    @abstractmethod
    def put_record(self, name: str, data: bytes) -> None:
        """Write a small record unless it is there already: the first writer wins."""

    @abstractmethod
    def delete_record(self, name: str) -> None:
        """Remove a small record, if it is there."""

    def close(self) -> None:
        """Release everything held. The backend must not be used afterwards."""
        return None

    def __contains__(self, key: str) -> bool:
        try:
            self.open(key).close()
        except ChunkNotFoundError:
            return False
        return True

    def _sizes(self) -> Iterator[int]:
        for key in self.keys():
            with contextlib.suppress(ChunkNotFoundError), self.open(key) as reader:
                yield reader.size
