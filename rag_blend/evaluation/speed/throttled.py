"""A store at the end of a line of a given speed, to see what hides behind the computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from rag_blend.storage.base import Bytes, EntryReader
from rag_blend.storage.memory import MemoryBackend


class Read(NamedTuple):
    """One read: which bytes of which entry."""

    key: str
    offset: int
    length: int


class Link:
    """A line that all readers share: bytes go through it one after the other, and arrive a latency later.

    Args:
        bytes_per_s: How many go through it in a second.
        latency_s: From a request to its first byte; requests under way at once wait for it at once.
        clock: Tells the time, in seconds.
        sleep: Waits for so many seconds; nobody spins.

    Raises:
        ValueError: The rate is not positive, or the latency is negative.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s <= 0 or latency_s < 0:
            raise ValueError(f"a link needs a positive rate and no negative latency, got {bytes_per_s}, {latency_s}")
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        """Wait until that many bytes have arrived."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            wait = self._free_at + self._latency_s - now
        self._sleep(wait)


class ThrottledBackend(MemoryBackend):
    """Entries in memory, read through a link; writing is not slowed down.

    Attributes:
        through: What reads go through; None: they cost nothing.
        reads: What was read since the list was last cleared.
    """

    parallel_reads = 8  # as an object store's

    def __init__(self) -> None:
        super().__init__()
        self.through: Link | None = None
        self.reads: list[Read] = []

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`."""
        return _ThrottledReader(key, super().open(key), self)

    def replay(self, reads: Sequence[Read]) -> None:
        """Do these reads and nothing else, as many at once as an engine does."""
        with ExitStack() as stack, ThreadPoolExecutor(self.parallel_reads) as pool:
            readers = {key: stack.enter_context(self.open(key)) for key in {read.key for read in reads}}
            list(pool.map(lambda read: readers[read.key].read(read.offset, read.length), reads))


class _ThrottledReader(EntryReader):
    def __init__(self, key: str, reader: EntryReader, backend: ThrottledBackend) -> None:
        self.size = reader.size
        self._key = key
        self._reader = reader
        self._backend = backend

    def read(self, offset: int, length: int) -> Bytes:
        self._backend.reads.append(Read(self._key, offset, length))
        if self._backend.through is not None:
            self._backend.through.carry(length)
        return self._reader.read(offset, length)

    def close(self) -> None:
        self._reader.close()
