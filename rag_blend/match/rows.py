"""Which chunks are in the index: their keys and lengths, one row each, found by key.

Everything else names a chunk by its row number, four bytes instead of a key's 32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from rag_blend.match.arrays import Int32, Int64, UInt8, UInt64, odd_numbers, row_hashes, with_room


def digest_of(key: str) -> bytes | None:
    """The 32 bytes of a key; None where it is not 64 lower-case hex digits."""
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        return None
    return digest if len(digest) == 32 and digest.hex() == key else None


def stacked(digests: Iterable[bytes]) -> UInt8:
    """Keys as `digest_of` gives them, as an array of shape (n, 32)."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


class Rows:
    """Keys (as digests, 32 bytes) and lengths, with an open-addressing table from key to row.

    A removed row stays until `compact`: fingerprints still name it by its number.

    Attributes:
        digests: Key of each row, shape (capacity, 32).
        tokens: Length of each row's chunk, shape (capacity,); -1 where the chunk was removed.
    """

    def __init__(self) -> None:
        self.digests: UInt8 = np.empty((0, 32), np.uint8)
        self.tokens: Int32 = np.empty(0, np.int32)
        self._count = 0
        self._dead = 0
        self._slots: Int32 = np.full(16, -1, np.int32)  # -1: free
        self._coefficients = odd_numbers(4)

    def __len__(self) -> int:
        """Number of living rows."""
        return self._count - self._dead

    @property
    def nbytes(self) -> int:
        """Bytes of RAM held."""
        return sum(sys.getsizeof(array) for array in (self.digests, self.tokens, self._slots))

    @property
    def wasteful(self) -> bool:
        """Whether more than a quarter of the rows are dead, so that dropping them pays."""
        return self._dead * 4 > self._count

    def find(self, digests: UInt8) -> Int64:
        """Row of each key, shape (n,), -1 where there is none; keys are of shape (n, 32)."""
        found = np.full(len(digests), -1, np.int64)
        asked, at = np.arange(len(digests)), self._homes(digests)
        while asked.size:
            rows = self._slots[at]
            taken = rows >= 0  # behind a free slot no key stands that would rather have stood there
            asked, at, rows = asked[taken], at[taken], rows[taken]
            same = (self.tokens[rows] >= 0) & (self.digests[rows] == digests[asked]).all(axis=1)
            found[asked[same]] = rows[same]
            asked, at = asked[~same], (at[~same] + 1) % self._slots.size
        return found

    def extend(self, digests: UInt8, tokens: Int64) -> Int64:
        """Add different keys that are not there yet, shape (n, 32); returns their rows, shape (n,), ascending."""
        start, stop = self._count, self._count + len(digests)
        self.digests = with_room(self.digests, start, stop)
        self.tokens = with_room(self.tokens, start, stop)
        self.digests[start:stop] = digests
        self.tokens[start:stop] = tokens
        self._count = stop
        rows = np.arange(start, stop)
        if stop * 3 > self._slots.size * 2:
            self._rehash()
        else:
            self._place(rows)
        return rows

    def kill(self, row: int) -> None:
        """Mark a row as removed."""
        self.tokens[row] = -1
        self._dead += 1

    def new_numbers(self) -> UInt64:
        """Row number after `compact` for each row of now, shape (rows,); meaningless for dead rows."""
        return (np.cumsum(self.tokens[: self._count] >= 0) - 1).astype(np.uint64)

    def compact(self) -> None:
        """Drop the dead rows; the others keep their order."""
        alive = self._living()
        self.digests = self.digests[alive]
        self.tokens = self.tokens[alive]
        self._count, self._dead = alive.size, 0
        self._rehash()

    def _living(self) -> Int64:
        return np.flatnonzero(self.tokens[: self._count] >= 0)

    def _homes(self, digests: UInt8) -> Int64:
        """Preferred slots of keys, shape (n,). The whole key counts: tests use keys like 000...01."""
        hashes = row_hashes(np.ascontiguousarray(digests).view(np.uint64), self._coefficients)
        return (hashes % np.uint64(self._slots.size)).astype(np.int64)

    def _rehash(self) -> None:
        """Rebuild the table with the living rows, at most a third full."""
        self._slots = np.full(max(16, 1 << (self._count * 2).bit_length()), -1, np.int32)
        self._place(self._living())

    def _place(self, rows: Int64) -> None:
        """Enter rows into the table, each at the first free slot from its home on."""
        at = self._homes(self.digests[rows])
        while rows.size:
            free = self._slots[at] < 0
            self._slots[at[free]] = rows[free]
            # Of several rows that wrote one slot the last stands; the others try the next slot.
            lost = self._slots[at] != rows
            rows, at = rows[lost], (at[lost] + 1) % self._slots.size
