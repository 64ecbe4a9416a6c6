"""From hits to a cover of the prompt: hits are gathered into candidates, candidates verified, the best first.

What comes out is certain, because every stretch was compared id by id with the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rag_blend.match.arrays import Bool, Int32, Int64, UInt8, runs, strides
from rag_blend.match.postings import Hits

TokenIdsOf = Callable[[str], Int32]
Announce = Callable[[list[str]], None]

# Candidates of one prompt that may turn out to be nothing (vanished entries, hash collisions).
_MAX_FRUITLESS = 512
_MOST_FORESEEN = 16
# A hit in a window that few chunks share outweighs any number of hits in boilerplate.
_RARE = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidates:
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

    positions: Int64
    groups: Int64
    weights: Int64
    chunks: Int64
    diagonals: Int64
    tokens: Int64
    digests: UInt8

    @classmethod
    def of(cls, hits: Hits, tokens: Int32, digests: UInt8, window: int) -> Candidates:
        """Group hits; length and key of each row are given, shapes (rows,) and (rows, 32)."""
        distinct, chunk = np.unique(hits.rows, return_inverse=True)
        by_length = np.argsort(tokens[distinct], kind="stable")
        distinct = distinct[by_length]
        chunk = np.argsort(by_length)[chunk]  # the inverse permutation
        lengths = tokens[distinct].astype(np.int64)
        # One integer for (chunk, diagonal); positions and offsets are below 2**31, so this fits.
        joint = (chunk << 32) | (hits.positions - hits.offsets + 2**31)
        places, groups = np.unique(joint, return_inverse=True)
        weights = strides(lengths, window)[chunk] * np.where(hits.common, 1, _RARE)
        order = np.argsort(hits.positions, kind="stable")
        return cls(
            positions=hits.positions[order],
            groups=groups[order],
            weights=weights[order],
            chunks=places >> 32,
            diagonals=(places & (2**32 - 1)) - 2**31,
            tokens=lengths,
            digests=digests[distinct],
        )

    def foreseen(self) -> list[str]:
        """Keys of the chunks of which most seems to stand in the prompt, the best-supported first, not too many."""
        of_hits = np.where(self.weights >= _RARE, self.weights // _RARE, self.weights)
        support = np.bincount(self.chunks[self.groups], of_hits, minlength=self.tokens.size)
        best = np.argsort(-support, kind="stable")[:_MOST_FORESEEN]
        return [self.key(int(chunk)) for chunk in best if 2 * support[chunk] >= self.tokens[chunk]]

    def key(self, chunk: int) -> str:
        """Key of a chunk, 64 hex digits."""
        return bytes(self.digests[chunk]).hex()


class Cover:
    """Covers one prompt with verified candidates, the best-supported first."""

    def __init__(self, prompt: Int32, window: int, candidates: Candidates, token_ids_of: TokenIdsOf) -> None:
        self._prompt = prompt
        self._window = window
        self._candidates = candidates
        self._token_ids_of = token_ids_of
        self._ids: dict[int, Int32 | None] = {}
        self._free = np.ones(prompt.size, np.bool_)
        self._tried = np.zeros(candidates.chunks.size, np.bool_)
        self._fruitless = 0
        self._stretches: list[tuple[int, int, int]] = []

    def stretches(self) -> list[tuple[int, int, int]]:
        """What is covered, as (start, stop, group), in the order of the prompt."""
        self._take_whole_windows()
        self._take_remainders()
        return sorted(self._stretches)

    def _take_whole_windows(self) -> None:
        """Take groups while one has a hit whose window is entirely free.

        Such a group always yields a match (but for collisions and vanished entries), so there are at most
        prompt_tokens / window rounds, however periodic the text is.
        """
        hits = self._candidates
        # h hits stand for (h - 1) * stride + window tokens: `base` + h * stride. At `base` no hit is left.
        base = self._window - strides(hits.tokens, self._window)[hits.chunks]
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

    def _roomy(self) -> Bool:
        """Which positions of the prompt, shape (prompt_tokens,), lie in a gap that has room for a match."""
        roomy = np.zeros(self._free.size, np.bool_)
        for start, stop in runs(self._free, self._window):
            roomy[start:stop] = True
        return roomy

    def _touches(self, roomy: Bool, positions: Int64) -> Bool:
        """Whether the windows at some positions, shape (n,), begin or end in such a gap."""
        return roomy[positions] | roomy[positions + self._window - 1]

    def _take(self, group: int) -> list[tuple[int, int]]:
        """Verify a group and cover what is equal; returns the stretches of the prompt, as (start, stop)."""
        self._tried[group] = True
        ids = self._fetch(int(self._candidates.chunks[group]))
        equal = self._equal_runs(int(self._candidates.diagonals[group]), ids) if ids is not None else []
        if not equal:
            self._fruitless += 1
        for start, stop in equal:
            self._free[start:stop] = False
            self._stretches.append((start, stop, group))
        return equal

    def _equal_runs(self, diagonal: int, ids: Int32) -> list[tuple[int, int]]:
        """Free stretches, as (start, stop), where the prompt equals a chunk put at position `diagonal`."""
        start, stop = max(0, diagonal), min(self._prompt.size, diagonal + ids.size)
        same = self._prompt[start:stop] == ids[start - diagonal : stop - diagonal]
        same &= self._free[start:stop]
        return [(start + first, start + last) for first, last in runs(same, self._window)]

    def _fetch(self, chunk: int) -> Int32 | None:
        """The chunk's ids, asked for once; None where the entry vanished or is not what was indexed."""
        if chunk not in self._ids:
            ids: Int32 | None = None
            try:
                ids = np.asarray(self._token_ids_of(self._candidates.key(chunk)))
            except KeyError:
                pass
            if ids is not None and ids.shape != (int(self._candidates.tokens[chunk]),):
                ids = None
            self._ids[chunk] = ids
        return self._ids[chunk]
