"""The index as callers see it: chunks are added and removed, and prompts are matched.

This module owns the lock and puts the parts together; each part is in a module of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from rag_blend.match.arrays import Int32, as_ids, fingerprints, odd_numbers, window_hashes
from rag_blend.match.cover import Announce, Candidates, Cover, TokenIdsOf
from rag_blend.match.postings import Postings
from rag_blend.match.rows import Rows, digest_of, stacked

# Chunks that `add_all` takes in one pass over numpy arrays: enough to be fast, few enough to stay in the CPU's caches.
_CHUNKS_AT_ONCE = 1024


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

    def __init__(self, token_ids_of: TokenIdsOf, window: int = 16, announce: Announce | None = None) -> None:
        """Make an empty index.

        Args:
            token_ids_of: Returns the ids, shape (chunk_tokens,), of the chunk with a given key. Runs in the
                thread that calls `match`, once per candidate chunk, and should cache. Where it raises
                KeyError or returns another number of ids (the entry vanished or was replaced) the chunk is
                skipped. Any other exception passes through `match`.
            window: Tokens a fingerprint covers, and the fewest tokens a match can have; at least 1.
            announce: Is told before, by `match`, for which keys the ids will be asked for, as far as can be foreseen:
                to have them brought all at once.

        Raises:
            ValueError: `window` is below 1.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._token_ids_of = token_ids_of
        self._announce = announce
        self._window = window
        self._coefficients = odd_numbers(window)
        self._lock = threading.Lock()
        self._rows = Rows()
        self._postings = Postings()

    def add(self, key: str, token_ids: npt.ArrayLike) -> None:
        """Index a chunk; a key that is already there is left as it is.

        Args:
            key: The chunk's key, 64 lower-case hex digits.
            token_ids: The chunk's ids, shape (chunk_tokens,), each 0 .. 2**31 - 1. Not kept.

        Raises:
            ValueError: The key is not 64 lower-case hex digits, or the ids are not such a list of integers.
        """
        self.add_all([(key, token_ids)])

    def add_all(self, chunks: Iterable[tuple[str, npt.ArrayLike]]) -> None:
        """Index chunks, given as (key, token_ids): as if each was given to `add`, but many times faster.

        Raises:
            ValueError: See `add`; some of the chunks in front of that one are in the index then.
        """
        rest = iter(chunks)
        while some := list(islice(rest, _CHUNKS_AT_ONCE)):
            self._add_some(some)

    def remove(self, key: str) -> None:
        """Forget a chunk; a key that is not there is ignored. Its RAM is freed in batches, not at once."""
        with self._lock:
            row = self._row_of(key)
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
            return len(self._rows)

    def __contains__(self, key: object) -> bool:
        """Whether a chunk with this key is in the index."""
        with self._lock:
            return isinstance(key, str) and self._row_of(key) >= 0

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
        prompt = as_ids(prompt_ids)
        if prompt.size < self._window:
            return []
        starts = np.arange(prompt.size - self._window + 1)
        hashes = window_hashes(prompt, starts, self._coefficients)
        with self._lock:
            hits = self._postings.hits(hashes, self._rows.tokens)
            if hits.positions.size == 0:
                return []
            found = Candidates.of(hits, self._rows.tokens, self._rows.digests, self._window)
        # From here on nothing of the index is used, so the callbacks run without the lock.
        if self._announce is not None:
            self._announce(found.foreseen())
        matches = []
        for start, stop, group in Cover(prompt, self._window, found, self._token_ids_of).stretches():
            chunk = int(found.chunks[group])
            matches.append(
                Match(
                    key=found.key(chunk),
                    start=start,
                    length=stop - start,
                    offset=start - int(found.diagonals[group]),
                    chunk_tokens=int(found.tokens[chunk]),
                )
            )
        return matches

    def _add_some(self, chunks: Sequence[tuple[str, npt.ArrayLike]]) -> None:
        by_digest: dict[bytes, Int32] = {}
        for key, token_ids in chunks:
            digest = digest_of(key)
            if digest is None:
                raise ValueError(f"a chunk key is 64 lower-case hex digits, got {key!r}")
            by_digest.setdefault(digest, as_ids(token_ids))
        digests, ids = stacked(by_digest), list(by_digest.values())
        tokens = np.array([chunk.size for chunk in ids], np.int64)
        chunk, offsets = fingerprints(tokens, self._window)
        starts = offsets + (np.cumsum(tokens) - tokens)[chunk]
        hashes = window_hashes(np.concatenate(ids), starts, self._coefficients)
        with self._lock:
            rows = self._rows.find(digests)
            new = rows < 0
            rows[new] = self._rows.extend(digests[new], tokens[new])
            added = new[chunk]
            self._postings.add(hashes[added], rows[chunk[added]], offsets[added], self._rows.tokens)

    def _row_of(self, key: str) -> int:
        """Row of a key, -1 where there is none; the caller holds the lock."""
        digest = digest_of(key)
        return -1 if digest is None else int(self._rows.find(stacked([digest]))[0])
