"""What was read from a farther tier is kept in the nearer ones, without reading it twice.

A reader remembers what passes through it. If that was the whole entry, the bytes are written to the nearer tiers in
the background, and then the farther tier is asked whether it still has the entry; if not, they are taken away again.

A deletion goes from the farthest tier to the nearest. So with f its deletion from the farther tier, n > f that from a
nearer one, w the write to it and c > w the question: if w < n, the deletion takes the bytes away; if w > n, then
f < n < w < c, so the question finds the entry gone. Whoever set the entry aside as damaged did the same. Within the
process the life of the key (`lives`) says it without asking.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rag_blend.storage._fork import repair_after_fork
from rag_blend.storage._tiers.lane import Job
from rag_blend.storage._tiers.lives import Life
from rag_blend.storage._tiers.tier import Tier
from rag_blend.storage.base import Bytes, EntryReader


class Budget:
    """Bytes that may be in use at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.after_fork()
        repair_after_fork(self)

    def after_fork(self) -> None:
        """See `Forkable`. Readers that were open keep what they have for nothing."""
        self._used = 0
        self._lock = threading.RLock()  # a reader may be collected, and give back, in the middle of anything

    def take(self, size: int) -> bool:
        """Take so many bytes, if there are; returns whether."""
        with self._lock:
            if self._used + size > self._limit:
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._used = max(0, self._used - size)


class RememberingReader(EntryReader):
    """An entry of a farther tier, and what has been read of it, in whatever order.

    Args:
        reader: The entry; closed with this.
        budget: Pays for what is remembered; the entry's size has been taken from it.
        whole: Given the bytes if all of them were read, as pieces in their order, and the duty to give back.
    """

    _is_open = False

    def __init__(self, reader: EntryReader, budget: Budget, whole: Callable[[list[Bytes]], None]) -> None:
        self.size = reader.size
        self._reader = reader
        self._budget = budget
        self._whole = whole
        self._pieces: dict[int, Bytes] = {}  # the longest that was read from each offset
        self._lock = threading.Lock()
        self._is_open = True

    def read(self, offset: int, length: int) -> Bytes:
        """See `EntryReader.read`."""
        data = self._reader.read(offset, length)
        with self._lock:
            if length > len(self._pieces.get(offset, ())):
                self._pieces[offset] = data
        return data

    def close(self) -> None:
        """See `EntryReader.close`. What was read only in part is not worth keeping."""
        if not self._is_open:
            return
        self._is_open = False
        self._reader.close()
        pieces, self._pieces = self._pieces, {}
        joined, end = [], 0
        for offset, data in sorted(pieces.items(), key=lambda piece: piece[0]):
            if offset <= end < offset + len(data):
                joined.append(data[end - offset :])
                end = offset + len(data)
        if end == self.size:
            self._whole(joined)
        else:
            self._budget.give_back(self.size)

    def __del__(self) -> None:
        if self._is_open:  # forgotten, not closed: nobody has vouched for the bytes
            self._is_open = False
            self._budget.give_back(self.size)


class Promotion(Job):
    """Bytes on their way into the tiers that are nearer than the one they were read from.

    Args:
        key: The entry.
        pieces: Its bytes.
        source: Where they were read.
        nearer: Where they go, nearest first.
        life: Ends when the entry is deleted, set aside or written anew in this process.
        lock: The key's.
        ended: Called in the end with the number of bytes, and whether some tier took them.
    """

    def __init__(
        self,
        key: str,
        pieces: list[Bytes],
        source: Tier,
        nearer: Sequence[Tier],
        life: Life,
        lock: threading.Lock,
        ended: Callable[[int, bool], None],
    ) -> None:
        self.name = key
        self.size = sum(len(piece) for piece in pieces)
        self._pieces = pieces
        self._source = source
        self._nearer = nearer
        self._life = life
        self._lock = lock
        self._ended = ended
        self._tried: list[Tier] = []  # where it may be now, answered or not
        self._is_kept = False

    def run(self) -> None:
        """See `Job.run`."""
        with self._lock:
            if not self._tried and not self._life.is_over:
                self._write()
        if self._tried and not self._is_still_there():
            self._take_back()

    def end(self) -> None:
        """See `Job.end`."""
        self._pieces = []
        self._ended(self.size, self._is_kept)

    def _write(self) -> None:
        data = b"".join(piece.data for piece in self._pieces)
        for tier in reversed(self._nearer):
            with tier.tolerated():
                if self.name not in tier.backend:
                    self._tried.append(tier)
                    tier.backend.write(self.name, data)
                    self._is_kept = True

    def _is_still_there(self) -> bool:
        with self._source.tolerated():
            return self.name in self._source.backend
        return False  # it does not say; without the bytes, the next query asks it again

    def _take_back(self) -> None:
        self.must_finish = True
        with self._lock:
            if not self._life.is_over:  # else this process has deleted or written it meanwhile, here as well
                for tier in self._tried:
                    tier.backend.delete(self.name)
        self._tried, self._is_kept = [], False
        self.must_finish = False
