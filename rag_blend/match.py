"""Where stored chunks lie in the token ids of a whole prompt.

The prompt is tokenised once, exactly as stock Hugging Face would, and never changed; this module only finds
which stretches of it are chunks whose keys and values are stored. No separators and no hints are needed:
cut, repeated, adjacent and overlapping chunks are found at any position, because *ids* are matched, not text.
(The CacheBlend paper, arXiv 2405.16444, is given the chunk borders; a framework's prompt does not show them.)

How it works:

1. every chunk leaves fingerprints: hashes of `window` consecutive ids, one each `window` tokens;
2. a prompt is hashed at every position, and each hash is looked up in sorted arrays;
3. hits of one chunk on one diagonal (prompt position - chunk offset) form a candidate;
4. best-supported first, a candidate's ids are fetched through the callback and compared, so a hash collision
   costs one comparison and can never become a wrong match.

The index keeps hashes, not ids: 16 bytes a fingerprint and some 50 bytes a chunk, all in numpy arrays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["ChunkIndex", "Match"]

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]
_UInt8 = npt.NDArray[np.uint8]

_TokenIdsOf = Callable[[str], _Int32]
_T = TypeVar("_T", bound=np.generic)

# Largest token id accepted (ids are compared as int32).
_MAX_ID = 2**31 - 1
# Places looked at for one window: boilerplate standing in 100,000 chunks must not become 100,000 candidates.
_MAX_PLACES = 16
# Candidates of one `match` that may turn out to be nothing (vanished entries, hash collisions).
_MAX_FRUITLESS = 512
# New fingerprints are sorted into a segment at the next match, or when this many wait.
_MAX_PENDING = 1 << 14
# Fixed seed: fingerprints depend on the ids only, so runs can be compared.
_SEED = 240516444
# A hit in a window that few chunks share outweighs any number of hits in boilerplate.
_RARE = 1 << 30
_ROW_SHIFT = np.uint64(32)
_OFFSET_MASK = np.uint64(2**32 - 1)


@dataclass(frozen=True, slots=True)
class Match:
    """A stretch of the prompt whose ids equal those of a stored chunk, or of a part of it.

    Attributes:
        key: The chunk's key, 64 hex digits.
        start: First prompt position covered.
        length: Number of prompt tokens covered.
        offset: First token of the chunk that stands at `start`; 0 unless the chunk's beginning is missing.
        chunk_tokens: Tokens of the whole chunk.
    """

    key: str
    start: int
    length: int
    offset: int
    chunk_tokens: int

    @property
    def end(self) -> int:
        """First prompt position after the match."""
        return self.start + self.length

    @property
    def edge_tokens(self) -> int:
        """Tokens of the chunk outside this match: edges that tokenised differently, or were cut off."""
        return self.chunk_tokens - self.length


class ChunkIndex:
    """Finds the stored chunks in prompts.

    The token ids of the chunks are not kept: `match` asks a callback for those of the few chunks it has
    reason to expect.

    What is found: with `window` = 16, any part of at least 31 tokens (2 * window - 1) of a chunk. Of a chunk
    shorter than 64 tokens (4 * window) 19 tokens are enough, of one shorter than 32 any 16. A shorter part of
    at least 16 tokens is found if it holds a fingerprint. **Chunks shorter than `window` tokens are accepted
    but never matched.** A window that stands in more than 16 places of the collection is boilerplate: only 16
    of the places are tried, and the right chunk is found by its other windows.

    Thread safety: all methods may be called from any thread. One lock guards the index. It is not held while
    the callback runs, so the callback may itself add or remove chunks; a chunk removed while a match is under
    way may still be returned by that match.
    """

    def __init__(self, token_ids_of: _TokenIdsOf, window: int = 16) -> None:
        """Make an empty index.

        Args:
            token_ids_of: Returns the ids, shape (chunk_tokens,), of the chunk with a given key. Runs in the
                thread that calls `match`, once per candidate chunk, and should cache. Where it raises
                KeyError or returns another number of ids (the entry vanished or was replaced) the chunk is
                skipped. Any other exception passes through `match`.
            window: Tokens a fingerprint covers, and the fewest tokens a match can have; at least 1.

        Raises:
            ValueError: `window` is below 1.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._token_ids_of = token_ids_of
        self._window = window
        self._coefficients = _odd_numbers(window)
        self._lock = threading.Lock()
        self._rows = _Rows()
        self._postings = _Postings()

    def add(self, key: str, token_ids: npt.ArrayLike) -> None:
        """Index a chunk; a key that is already there is left as it is.

        Args:
            key: The chunk's key, 64 lower-case hex digits.
            token_ids: The chunk's ids, shape (chunk_tokens,), each 0 .. 2**31 - 1. Not kept.

        Raises:
            ValueError: The key is not 64 lower-case hex digits, or the ids are not such a list of integers.
        """
        digest = _digest(key)
        if digest is None:
            raise ValueError(f"a chunk key is 64 lower-case hex digits, got {key!r}")
        ids = _as_ids(token_ids)
        offsets = _fingerprint_offsets(ids.size, self._window)
        hashes = _window_hashes(ids, offsets, self._coefficients)
        with self._lock:
            if self._rows.find(digest) >= 0:
                return
            row = self._rows.append(digest, ids.size)
            places = offsets.astype(np.uint64) | (np.uint64(row) << _ROW_SHIFT)
            self._postings.add(hashes, places, self._rows.tokens)

    def remove(self, key: str) -> None:
        """Forget a chunk; a key that is not there is ignored. Its RAM is freed in batches, not at once."""
        digest = _digest(key)
        if digest is None:
            return
        with self._lock:
            row = self._rows.find(digest)
            if row < 0:
                return
            self._rows.kill(row)
            if self._rows.wasteful:
                # The postings go first: they need the old lengths to tell which rows are dead.
                self._postings.renumber(self._rows.tokens, self._rows.new_numbers())
                self._rows.compact()

    def __len__(self) -> int:
        """Number of chunks in the index, those too short to be matched included."""
        with self._lock:
            return self._rows.count - self._rows.dead

    def __contains__(self, key: object) -> bool:
        """Whether a chunk with this key is in the index."""
        digest = _digest(key) if isinstance(key, str) else None
        if digest is None:
            return False
        with self._lock:
            return self._rows.find(digest) >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of RAM the index holds between calls: fingerprints, keys, lookup table and spare capacity."""
        with self._lock:
            return self._rows.nbytes + self._postings.nbytes

    def match(self, prompt_ids: npt.ArrayLike) -> list[Match]:
        """Find the stored chunks in a prompt.

        Where chunks overlap, the one with the most support keeps its tokens and the other is trimmed to what
        is left, or dropped when less than `window` tokens are left. A chunk whose ids differ somewhere inside
        comes back as several matches with the same key.

        Args:
            prompt_ids: Ids of the whole prompt, shape (prompt_tokens,), each 0 .. 2**31 - 1. Not changed.

        Returns:
            Matches of at least `window` tokens, sorted by `start`, none overlapping another. Empty for a
            prompt shorter than `window`.

        Raises:
            ValueError: The ids are not a flat list of such integers.
        """
        prompt = _as_ids(prompt_ids)
        if prompt.size < self._window:
            return []
        starts = np.arange(prompt.size - self._window + 1)
        hashes = _window_hashes(prompt, starts, self._coefficients)
        with self._lock:
            candidates = self._lookup(hashes)
        if candidates is None:
            return []
        return _Cover(prompt, self._window, candidates, self._token_ids_of).matches()

    def _lookup(self, hashes: _UInt64) -> _Candidates | None:
        """Candidates for a prompt whose window hashes, shape (positions,), are given. Needs the lock."""
        tokens = self._rows.tokens
        self._postings.flush(tokens)
        # Each distinct hash is looked up once and in ascending order, so that lookups share cache lines.
        order = np.argsort(hashes)
        ordered = hashes[order]
        fresh = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        which, places, common = self._postings.find(ordered[fresh], tokens)
        if which.size == 0:
            return None
        # From "hash -> places" to "position -> places": equal windows of the prompt share their places.
        query = np.cumsum(fresh) - 1
        counts = np.bincount(which, minlength=common.size)
        first = np.cumsum(counts) - counts
        hits = _ranges(first[query], counts[query])
        positions = np.repeat(order, counts[query])
        rows = (places[hits] >> _ROW_SHIFT).astype(np.int64)
        offsets = (places[hits] & _OFFSET_MASK).astype(np.int64)
        return _Candidates.of(self._rows, self._window, positions, rows, offsets, common[which[hits]])


# --- what the index holds -------------------------------------------------------------------------


class _Rows:
    """The chunks' keys and lengths, one row each, with an open-addressing table from key to row.

    A removed row stays until `compact`: fingerprints still name it by its number.
    """

    def __init__(self) -> None:
        self.count = 0
        self.dead = 0
        self.digests: _UInt8 = np.empty((0, 32), np.uint8)
        self.tokens: _Int32 = np.empty(0, np.int32)  # -1: removed
        self._slots: _Int32 = np.full(16, -1, np.int32)  # -1: free
        self._coefficients = _odd_numbers(4)

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(array) for array in (self.digests, self.tokens, self._slots))

    @property
    def wasteful(self) -> bool:
        """Whether more than a quarter of the rows are dead, so that dropping them pays."""
        return self.dead * 4 > self.count

    def find(self, digest: bytes) -> int:
        """Row of a key, -1 where there is none."""
        at = self._home(digest)
        while (row := int(self._slots[at])) >= 0:
            if self.tokens[row] >= 0 and self.digests[row].tobytes() == digest:
                return row
            at = (at + 1) % self._slots.size
        return -1

    def append(self, digest: bytes, tokens: int) -> int:
        """Add a key that is not there yet; returns its row."""
        row = self.count
        self.digests = _with_room(self.digests, row, row + 1)
        self.tokens = _with_room(self.tokens, row, row + 1)
        self.digests[row] = np.frombuffer(digest, np.uint8)
        self.tokens[row] = tokens
        self.count += 1
        if self.count * 3 > self._slots.size * 2:
            self._rehash()
        else:
            at = self._home(digest)
            while self._slots[at] >= 0:
                at = (at + 1) % self._slots.size
            self._slots[at] = row
        return row

    def kill(self, row: int) -> None:
        self.tokens[row] = -1
        self.dead += 1

    def new_numbers(self) -> _UInt64:
        """Row number after `compact` for each row of now, shape (count,); meaningless for dead rows."""
        return (np.cumsum(self.tokens[: self.count] >= 0) - 1).astype(np.uint64)

    def compact(self) -> None:
        """Drop the dead rows; the others keep their order."""
        alive = np.flatnonzero(self.tokens[: self.count] >= 0)
        self.digests = self.digests[alive]
        self.tokens = self.tokens[alive]
        self.count, self.dead = alive.size, 0
        self._rehash()

    def _homes(self, digests: _UInt8) -> _Int64:
        """Preferred slots of keys, shape (n,). The whole key counts: tests use keys like 000...01."""
        words = np.ascontiguousarray(digests).view(np.uint64)
        mixed = _mixed((words * self._coefficients).sum(axis=1, dtype=np.uint64))
        return (mixed % np.uint64(self._slots.size)).astype(np.int64)

    def _home(self, digest: bytes) -> int:
        return int(self._homes(np.frombuffer(digest, np.uint8).reshape(1, 32))[0])

    def _rehash(self) -> None:
        """Rebuild the table with the living rows, at most a third full."""
        self._slots = np.full(max(16, 1 << (self.count * 2).bit_length()), -1, np.int32)
        rows = np.flatnonzero(self.tokens[: self.count] >= 0).astype(np.int32)
        at = self._homes(self.digests[rows])
        while rows.size:
            free = self._slots[at] < 0
            self._slots[at[free]] = rows[free]
            # Of several rows that wrote one slot the last stands; the others try the next slot.
            lost = self._slots[at] != rows
            rows, at = rows[lost], (at[lost] + 1) % self._slots.size


class _Postings:
    """Fingerprints as sorted segments, a small log-structured merge tree.

    A segment is one array of shape (2, n): hashes in ascending order over places. A place is a row in its
    upper 32 bits and a chunk offset in its lower. New fingerprints wait unsorted. Each segment is at least
    twice as large as the next, so there are few, and a fingerprint is copied a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._segments: list[_UInt64] = []
        self._pending: _UInt64 = np.empty((0, 2), np.uint64)
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(array) for array in (self._pending, *self._segments))

    def add(self, hashes: _UInt64, places: _UInt64, tokens: _Int32) -> None:
        """Let fingerprints, two arrays of shape (n,), wait for the next flush."""
        stop = self._waiting + hashes.size
        self._pending = _with_room(self._pending, self._waiting, stop)
        self._pending[self._waiting : stop, 0] = hashes
        self._pending[self._waiting : stop, 1] = places
        self._waiting = stop
        if stop >= _MAX_PENDING:
            self.flush(tokens)

    def flush(self, tokens: _Int32) -> None:
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
        self._push(np.concatenate(parts[::-1], axis=1), tokens)

    def renumber(self, tokens: _Int32, new_numbers: _UInt64) -> None:
        """Drop the places of dead rows and give the others their new row numbers."""
        self.flush(tokens)
        segments, self._segments = self._segments, []
        for segment in segments:
            living = _living(segment, tokens)
            rows = new_numbers[(living[1] >> _ROW_SHIFT).astype(np.int64)]
            living[1] = (rows << _ROW_SHIFT) | (living[1] & _OFFSET_MASK)
            if living.size:
                self._segments.append(living)

    def find(self, queries: _UInt64, tokens: _Int32) -> tuple[_Int64, _UInt64, npt.NDArray[np.bool_]]:
        """Places of some hashes.

        Args:
            queries: Distinct hashes in ascending order, shape (q,).
            tokens: Length of each row's chunk, negative for dead rows.

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

    def _push(self, postings: _UInt64, tokens: _Int32) -> None:
        living = _living(postings, tokens)
        if living.size:
            # `take`, because indexing columns would give an array that is contiguous the other way.
            self._segments.append(living.take(np.argsort(living[0], kind="stable"), axis=1))


def _living(postings: _UInt64, tokens: _Int32) -> _UInt64:
    """A copy, shape (2, n), without the places of dead rows."""
    alive = tokens[(postings[1] >> _ROW_SHIFT).astype(np.int64)] >= 0
    return np.ascontiguousarray(postings[:, alive])


def _search(
    segment: _UInt64, queries: _UInt64, tokens: _Int32, widths: _Int64
) -> tuple[_Int64, _UInt64]:
    """Places of the queries in one segment, as (which, places); adds their number to `widths`, shape (q,)."""
    hashes, all_places = segment
    low = np.searchsorted(hashes, queries)
    seen = np.flatnonzero(hashes[np.minimum(low, hashes.size - 1)] == queries)
    low = low[seen]
    width = np.searchsorted(hashes, queries[seen], side="right") - low
    widths[seen] += width
    taken = np.minimum(width, _MAX_PLACES)
    owner = np.repeat(np.arange(seen.size), taken)
    places = all_places[_ranges(low, taken)]
    dead = tokens[(places >> _ROW_SHIFT).astype(np.int64)] < 0
    if dead.any():
        # The living places may stand behind the first few: look at all. Ranges of distinct hashes do not
        # overlap, so this is never more than the segment. The caller cuts to `_MAX_PLACES` again.
        stale = np.unique(owner[dead])
        taken[stale] = width[stale]
        owner = np.repeat(np.arange(seen.size), taken)
        places = all_places[_ranges(low, taken)]
        alive = tokens[(places >> _ROW_SHIFT).astype(np.int64)] >= 0
        owner, places = owner[alive], places[alive]
    return seen[owner], places


# --- what a match works with ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Hits of one prompt, gathered into groups: a chunk at one place. Owns its arrays, so no lock is needed.

    Groups are ordered by chunk length: of two chunks with the same support the shorter is matched more fully.

    Attributes:
        positions: Prompt position of each hit, shape (hits,), ascending.
        groups: Group of each hit, shape (hits,).
        weights: Support a hit gives to its group, about the tokens it stands for, shape (hits,).
        chunks: Chunk of each group, an index into the last two, shape (groups,).
        diagonals: Prompt position at which the chunk's first token would stand, shape (groups,).
        tokens: Length of each chunk, shape (chunks,).
        digests: Key of each chunk, shape (chunks, 32).
    """

    positions: _Int64
    groups: _Int64
    weights: _Int64
    chunks: _Int64
    diagonals: _Int64
    tokens: _Int64
    digests: _UInt8

    @classmethod
    def of(
        cls,
        table: _Rows,
        window: int,
        positions: _Int64,
        rows: _Int64,
        offsets: _Int64,
        common: npt.NDArray[np.bool_],
    ) -> _Candidates:
        """Group hits, given as arrays of shape (hits,): where, which row, which offset, whether common."""
        distinct, chunk = np.unique(rows, return_inverse=True)
        by_length = np.argsort(table.tokens[distinct], kind="stable")
        distinct = distinct[by_length]
        chunk = np.argsort(by_length)[chunk]  # the inverse permutation
        tokens = table.tokens[distinct].astype(np.int64)
        # One integer for (chunk, diagonal); positions and offsets are below 2**31, so this fits.
        joint = (chunk << 32) | (positions - offsets + 2**31)
        places, groups = np.unique(joint, return_inverse=True)
        weights = _strides(tokens, window)[chunk] * np.where(common, 1, _RARE)
        order = np.argsort(positions, kind="stable")
        return cls(
            positions=positions[order],
            groups=groups[order],
            weights=weights[order],
            chunks=places >> 32,
            diagonals=(places & (2**32 - 1)) - 2**31,
            tokens=tokens,
            digests=table.digests[distinct],
        )


class _Cover:
    """Covers one prompt with verified candidates, the best-supported first."""

    def __init__(
        self, prompt: _Int32, window: int, candidates: _Candidates, token_ids_of: _TokenIdsOf
    ) -> None:
        self._prompt = prompt
        self._window = window
        self._candidates = candidates
        self._token_ids_of = token_ids_of
        self._ids: dict[int, _Int32 | None] = {}
        self._free = np.ones(prompt.size, np.bool_)
        self._tried = np.zeros(candidates.chunks.size, np.bool_)
        self._fruitless = 0
        self._matches: list[Match] = []

    def matches(self) -> list[Match]:
        """All matches, sorted by start."""
        self._take_whole_windows()
        self._take_remainders()
        return sorted(self._matches, key=lambda match: match.start)

    def _take_whole_windows(self) -> None:
        """Take groups while one has a hit whose window is entirely free.

        Such a group always yields a match (but for collisions and vanished entries), so there are at most
        prompt_tokens / window rounds, however periodic the text is.
        """
        hits = self._candidates
        # h hits stand for (h - 1) * stride + window tokens: `base` + h * stride. At `base` no hit is left.
        base = self._window - _strides(hits.tokens, self._window)[hits.chunks]
        base[hits.groups[hits.weights >= _RARE]] *= _RARE
        score = base.copy()
        np.add.at(score, hits.groups, hits.weights)
        alive = np.ones(hits.positions.size, np.bool_)
        while self._fruitless < _MAX_FRUITLESS:
            group = int(np.argmax(score))
            if score[group] <= 0:
                return
            score[group] = 0
            for start, stop in self._take(group):
                # Windows that reach into the match are no longer free.
                i, j = np.searchsorted(hits.positions, (start - self._window + 1, stop))
                lost = np.flatnonzero(alive[i:j]) + i
                alive[lost] = False
                touched = hits.groups[lost]
                np.subtract.at(score, touched, hits.weights[lost])
                score[touched[score[touched] <= base[touched]]] = 0
            chunk = int(hits.chunks[group])
            if self._ids[chunk] is None:
                score[hits.chunks == chunk] = 0

    def _take_remainders(self) -> None:
        """Take what reaches out of covered stretches: overlapping chunks with no whole window left."""
        hits = self._candidates
        roomy = self._roomy()
        useful = np.flatnonzero(~self._tried[hits.groups] & self._touches(roomy, hits.positions))
        useful = useful[np.argsort(hits.groups[useful], kind="stable")]
        groups, first = np.unique(hits.groups[useful], return_index=True)
        parts = np.split(hits.positions[useful], first[1:])
        for i in sorted(range(groups.size), key=lambda i: -parts[i].size):
            if self._fruitless >= _MAX_FRUITLESS:
                return
            # Matches taken meanwhile may have closed the gap: asking again saves a fetch.
            if self._touches(roomy, parts[i]).any() and self._take(int(groups[i])):
                roomy = self._roomy()

    def _roomy(self) -> npt.NDArray[np.bool_]:
        """Which positions of the prompt, shape (prompt_tokens,), lie in a gap that has room for a match."""
        roomy = np.zeros(self._free.size, np.bool_)
        for start, stop in _runs(self._free, self._window):
            roomy[start:stop] = True
        return roomy

    def _touches(self, roomy: npt.NDArray[np.bool_], positions: _Int64) -> npt.NDArray[np.bool_]:
        """Whether the windows at some positions, shape (n,), begin or end in such a gap."""
        return roomy[positions] | roomy[positions + self._window - 1]

    def _take(self, group: int) -> list[tuple[int, int]]:
        """Verify a group and cover what is equal; returns the stretches of the prompt, as (start, stop)."""
        self._tried[group] = True
        chunk = int(self._candidates.chunks[group])
        ids = self._fetch(chunk)
        runs = self._equal_runs(int(self._candidates.diagonals[group]), ids) if ids is not None else []
        if not runs:
            self._fruitless += 1
        for start, stop in runs:
            self._free[start:stop] = False
            self._matches.append(
                Match(
                    key=self._candidates.digests[chunk].tobytes().hex(),
                    start=start,
                    length=stop - start,
                    offset=start - int(self._candidates.diagonals[group]),
                    chunk_tokens=int(self._candidates.tokens[chunk]),
                )
            )
        return runs

    def _equal_runs(self, diagonal: int, ids: _Int32) -> list[tuple[int, int]]:
        """Free stretches, as (start, stop), where the prompt equals a chunk put at position `diagonal`."""
        start, stop = max(0, diagonal), min(self._prompt.size, diagonal + ids.size)
        same = self._prompt[start:stop] == ids[start - diagonal : stop - diagonal]
        same &= self._free[start:stop]
        return [(start + first, start + last) for first, last in _runs(same, self._window)]

    def _fetch(self, chunk: int) -> _Int32 | None:
        """The chunk's ids, asked for once; None where the entry vanished or is not what was indexed."""
        if chunk not in self._ids:
            ids: _Int32 | None = None
            try:
                ids = np.asarray(self._token_ids_of(self._candidates.digests[chunk].tobytes().hex()))
            except KeyError:
                pass
            if ids is not None and ids.shape != (int(self._candidates.tokens[chunk]),):
                ids = None
            self._ids[chunk] = ids
        return self._ids[chunk]


# --- small helpers --------------------------------------------------------------------------------


def _as_ids(token_ids: npt.ArrayLike) -> _Int32:
    """Token ids as an int32 array of shape (n,)."""
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() > _MAX_ID:
        raise ValueError(f"token ids must lie in 0 .. {_MAX_ID}, got {ids.min()} .. {ids.max()}")
    return ids.astype(np.int32, copy=False)


def _digest(key: str) -> bytes | None:
    """The 32 bytes of a key; None where it is not 64 lower-case hex digits."""
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        return None
    return digest if len(digest) == 32 and digest.hex() == key else None


def _strides(tokens: int | _Int64, window: int) -> _Int64:
    """Tokens between two fingerprints of a chunk, for one length or an array of lengths.

    Short chunks are fingerprinted more finely, so that a few tokens changed at an edge do not hide them.
    """
    short = np.where(np.less(tokens, 4 * window), max(1, window // 4), window)
    return np.where(np.less(tokens, 2 * window), 1, short)


def _fingerprint_offsets(tokens: int, window: int) -> _Int64:
    """Offsets, shape (n,), of the windows of a chunk that are indexed; the last full window is always one."""
    last = tokens - window
    if last < 0:
        return np.empty(0, np.int64)
    offsets = np.arange(0, last + 1, int(_strides(tokens, window)))
    return offsets if offsets[-1] == last else np.append(offsets, last)


def _window_hashes(ids: _Int32, starts: _Int64, coefficients: _UInt64) -> _UInt64:
    """Hashes, shape (n,), of the windows beginning at `starts`: multilinear mod 2**64, then mixed."""
    windows = ids.astype(np.uint64)[starts[:, None] + np.arange(coefficients.size)]
    return _mixed((windows * coefficients).sum(axis=1, dtype=np.uint64))


def _mixed(values: _UInt64) -> _UInt64:
    """The splitmix64 finaliser: every bit of the input reaches every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _odd_numbers(count: int) -> _UInt64:
    """Random odd 64-bit numbers, shape (count,), always the same."""
    numbers = np.random.default_rng(_SEED).integers(0, 2**64, size=count, dtype=np.uint64)
    return numbers | np.uint64(1)


def _ranges(starts: _Int64, counts: _Int64) -> _Int64:
    """The integers start, start + 1, ... (count of them) for each pair, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if ends.size else 0)


def _runs(flags: npt.NDArray[np.bool_], shortest: int) -> list[tuple[int, int]]:
    """Maximal stretches of True, as (start, stop), of at least `shortest`."""
    padded = np.zeros(flags.size + 2, np.int8)
    padded[1:-1] = flags
    edges = np.flatnonzero(np.diff(padded))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= shortest
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def _with_room(array: npt.NDArray[_T], used: int, needed: int) -> npt.NDArray[_T]:
    """The array if `needed` rows fit, else a copy of its first `used` rows with a quarter more capacity."""
    if needed <= array.shape[0]:
        return array
    larger = np.empty((max(needed, used + used // 4 + 16), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
