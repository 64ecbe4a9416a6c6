"""From a fingerprint to the places where it stands, in sorted numpy arrays.

A posting is a hash and a place; a place is a row (a chunk's number) in its upper 32 bits and an offset in
that chunk in its lower. Only this module knows so. Dead rows, those with a negative length in the `tokens`
array that the methods take, are passed over by lookups and dropped whenever segments are merged.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from rag_blend.match.arrays import Bool, Int32, Int64, UInt64, ranges, with_room

# Places looked at for one window: boilerplate standing in 100,000 chunks must not become 100,000 candidates.
_MAX_PLACES = 16
# New postings are sorted into a segment at the next lookup, or when this many wait.
_MAX_PENDING = 1 << 14
_ROW_SHIFT = np.uint64(32)
_OFFSET_MASK = np.uint64(2**32 - 1)


class Hits(NamedTuple):
    """Windows of a prompt that also stand in chunks, as arrays of shape (hits,).

    Attributes:
        positions: Where in the prompt.
        rows: In which chunk.
        offsets: Where in the chunk.
        common: Whether the window has more places than are looked at.
    """

    positions: Int64
    rows: Int64
    offsets: Int64
    common: Bool


class Postings:
    """Postings as sorted segments, a small log-structured merge tree.

    A segment is one array of shape (2, n): hashes in ascending order over places. New postings wait unsorted.
    Each segment is at least twice as large as the next, so there are few, and a posting is copied a
    logarithmic number of times.
    """

    def __init__(self) -> None:
        self._segments: list[UInt64] = []
        self._pending: UInt64 = np.empty((0, 2), np.uint64)
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        """Bytes of RAM held."""
        return sum(sys.getsizeof(array) for array in (self._pending, *self._segments))

    def add(self, hashes: UInt64, rows: Int64, offsets: Int64, tokens: Int32) -> None:
        """Add fingerprints: hashes, in which rows and at which offsets they stand, each of shape (n,)."""
        stop = self._waiting + hashes.size
        self._pending = with_room(self._pending, self._waiting, stop)
        self._pending[self._waiting : stop, 0] = hashes
        self._pending[self._waiting : stop, 1] = offsets.astype(np.uint64) | (rows.astype(np.uint64) << _ROW_SHIFT)
        self._waiting = stop
        if stop >= _MAX_PENDING:
            self._flush(tokens)

    def hits(self, hashes: UInt64, tokens: Int32) -> Hits:
        """Look up the window hashes of a prompt, shape (positions,), at least one."""
        self._flush(tokens)
        # Each distinct hash is looked up once and in ascending order, so that lookups share cache lines.
        order = np.argsort(hashes)
        ordered = hashes[order]
        fresh = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        which, places, common = self._find(ordered[fresh], tokens)
        # From "hash -> places" to "position -> places": equal windows of the prompt share their places.
        query = np.cumsum(fresh) - 1
        counts = np.bincount(which, minlength=common.size)
        first = np.cumsum(counts) - counts
        taken = ranges(first[query], counts[query])
        return Hits(
            positions=np.repeat(order, counts[query]),
            rows=_rows(places[taken]),
            offsets=(places[taken] & _OFFSET_MASK).astype(np.int64),
            common=common[which[taken]],
        )

    def renumber(self, tokens: Int32, new_numbers: UInt64) -> None:
        """Drop the places of dead rows and give the others their new row numbers."""
        self._flush(tokens)
        segments, self._segments = self._segments, []
        for segment in segments:
            living = _living(segment, tokens)
            rows = new_numbers[_rows(living[1])]
            living[1] = (rows << _ROW_SHIFT) | (living[1] & _OFFSET_MASK)
            if living.size:
                self._segments.append(living)

    def _flush(self, tokens: Int32) -> None:
        """Sort what waits into a segment, together with the older segments that are not much larger."""
        if not self._waiting:
            return
        parts = [self._pending[: self._waiting].T]
        size = self._waiting
        while self._segments and self._segments[-1].shape[1] < 2 * size:
            parts.append(self._segments.pop())
            size += parts[-1].shape[1]
        self._pending, self._waiting = np.empty((0, 2), np.uint64), 0
        # Oldest first and a stable sort: places of one hash stay in the order in which they came.
        living = _living(np.concatenate(parts[::-1], axis=1), tokens)
        if living.size:
            # `take`, because indexing columns would give an array that is contiguous the other way.
            self._segments.append(living.take(np.argsort(living[0], kind="stable"), axis=1))

    def _find(self, queries: UInt64, tokens: Int32) -> tuple[Int64, UInt64, Bool]:
        """Places of some distinct hashes, given in ascending order, shape (q,).

        Returns:
            which, shape (n,) ascending: index into `queries`; places, shape (n,): at most `_MAX_PLACES` for
            each query and none of a dead row; common, shape (q,): whether the hash has more places than that.
        """
        widths = np.zeros(queries.size, np.int64)
        found = [_search(segment, queries, tokens, widths) for segment in self._segments]
        common = widths > _MAX_PLACES
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.uint64), common
        which = np.concatenate([part[0] for part in found])
        places = np.concatenate([part[1] for part in found])
        order = np.argsort(which, kind="stable")
        which, places = which[order], places[order]
        first = np.searchsorted(which, which)
        kept = np.arange(which.size) - first < _MAX_PLACES
        return which[kept], places[kept], common


def _rows(places: UInt64) -> Int64:
    """Row of each place."""
    return (places >> _ROW_SHIFT).astype(np.int64)


def _living(postings: UInt64, tokens: Int32) -> UInt64:
    """A copy, shape (2, n), without the places of dead rows."""
    return np.ascontiguousarray(postings[:, tokens[_rows(postings[1])] >= 0])


def _search(segment: UInt64, queries: UInt64, tokens: Int32, widths: Int64) -> tuple[Int64, UInt64]:
    """Places of the queries in one segment, as (which, places); adds their number to `widths`, shape (q,)."""
    hashes, all_places = segment
    low = np.searchsorted(hashes, queries)
    seen = np.flatnonzero(hashes[np.minimum(low, hashes.size - 1)] == queries)
    low = low[seen]
    width = np.searchsorted(hashes, queries[seen], side="right") - low
    widths[seen] += width
    taken = np.minimum(width, _MAX_PLACES)
    owner = np.repeat(np.arange(seen.size), taken)
    places = all_places[ranges(low, taken)]
    dead = tokens[_rows(places)] < 0
    if dead.any():
        # The living places may stand behind the first few: look at all. Ranges of distinct hashes do not
        # overlap, so this is never more than the segment. The caller cuts to `_MAX_PLACES` again.
        stale = np.unique(owner[dead])
        taken[stale] = width[stale]
        owner = np.repeat(np.arange(seen.size), taken)
        places = all_places[ranges(low, taken)]
        alive = tokens[_rows(places)] >= 0
        owner, places = owner[alive], places[alive]
    return seen[owner], places
