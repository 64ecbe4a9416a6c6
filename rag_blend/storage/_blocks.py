"""Reading an entry of a far-away medium: a few large requests instead of many small ones."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import numpy as np

from rag_blend.errors import CorruptChunkError
from rag_blend.storage.base import Bytes, EntryReader

FIRST_BYTES = 256 << 10
"""What opening an entry fetches: its header and first layers, or all of a small one. More would make a query wait for
bytes that could be fetched while it computes, and be fetched in vain where only the header is wanted."""
BLOCK_BYTES = 4 << 20
"""What is fetched of the rest at once, whatever is asked for: a round trip costs as much as some hundred kilobytes."""


class BlockReader(EntryReader):
    """An entry, fetched in blocks when they are first needed. What was fetched stays until the reader is closed.

    Args:
        size: Bytes of the entry, as the medium itself counts them: so much memory is reserved, and used as it fills.
        first: The entry's first bytes; all of it if it is small.
        fetch: Called with offset and length, returns these bytes of the very same version of the entry, or raises.

    Raises:
        CorruptChunkError: No entry can have this size.
    """

    def __init__(self, size: int, first: bytes | memoryview, fetch: Callable[[int, int], bytes | memoryview]) -> None:
        self.size = size
        self._fetch = fetch
        self._lock = threading.Lock()
        try:
            self._data: Bytes | None = np.empty(size, dtype=np.uint8)  # of our own: torch warns of what is read-only
        except (MemoryError, ValueError):
            raise CorruptChunkError(f"an entry is said to have {size} bytes") from None
        self._begin = min(len(first), size)  # the blocks lie behind it
        self._fetched: set[int] = set()
        self._data[: self._begin] = np.frombuffer(first, dtype=np.uint8)[: self._begin]

    def read(self, offset: int, length: int) -> Bytes:
        """See `EntryReader.read`.

        Raises:
            OSError: The medium does not answer, or the entry was deleted or replaced after it was opened.
        """
        end = offset + length
        if end > self.size:
            raise CorruptChunkError(f"entry has {self.size} bytes, {end} were expected")
        with self._lock:
            if self._data is None:
                raise ValueError("the entry is closed")
            for block in range(max(0, offset - self._begin) // BLOCK_BYTES, -(-(end - self._begin) // BLOCK_BYTES)):
                if block not in self._fetched:
                    self._fill(self._data, self._begin + block * BLOCK_BYTES)
                    self._fetched.add(block)
            return self._data[offset:end]

    def close(self) -> None:
        """See `EntryReader.close`."""
        self._data = None

    def _fill(self, data: Bytes, start: int) -> None:
        length = min(BLOCK_BYTES, self.size - start)
        fetched = self._fetch(start, length)
        if len(fetched) != length:
            raise CorruptChunkError(f"entry ends at byte {start + len(fetched)} of {self.size}")
        data[start : start + length] = np.frombuffer(fetched, dtype=np.uint8)


def changed_meanwhile(key: str) -> OSError:
    """What `fetch` raises when the entry is not the one that was opened. No damage: what is there now may be good."""
    return OSError(errno.ESTALE, f"entry {key[:12]} was deleted or replaced while it was read")
