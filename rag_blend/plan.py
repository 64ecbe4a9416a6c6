"""From a prompt and the chunks found in it to segments: what is reused, what is computed. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rag_blend.match import Match

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt positions `start` to `end` (exclusive) whose keys and values come from one stored chunk.

    Attributes:
        start: First prompt position.
        end: One past the last prompt position.
        key: The chunk's key.
        offset: The chunk's token that stands at `start`.
        exact: The stored values equal those of a full prefill, because the chunk was cached behind exactly the
            tokens in front of it.
    """

    start: int
    end: int
    key: str
    offset: int
    exact: bool

    def __len__(self) -> int:
        return self.end - self.start

    def head(self, num_tokens: int) -> Segment:
        """Its first tokens, at most `num_tokens`."""
        return replace(self, end=min(self.end, self.start + num_tokens))


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """A prompt and what is reused of it; everything else is fresh: it is always computed.

    Attributes:
        num_tokens: Length of the prompt.
        segments: What stored chunks cover, in order and without overlap.
        kept: So many tokens at the start, in front of all segments, are those of an earlier prompt.
        kept_exact: They were prefilled exactly; otherwise that prompt was blended.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    kept: int = 0
    kept_exact: bool = True

    @property
    def reuses(self) -> bool:
        """Whether anything is reused at all."""
        return bool(self.kept or self.segments)

    @property
    def is_exact(self) -> bool:
        """Whether nothing in it is an approximation."""
        return self.kept_exact and not self.blended

    @property
    def exact_tokens(self) -> int:
        """Tokens reused without any approximation."""
        return sum(len(s) for s in self.segments if s.exact) + (self.kept if self.kept_exact else 0)

    @property
    def blended(self) -> tuple[Segment, ...]:
        """The segments whose values are an approximation: the ones a selector repairs."""
        return tuple(s for s in self.segments if not s.exact)

    @property
    def reusable(self) -> Positions:
        """Positions of the blended segments, ascending."""
        return positions_of(self.blended)

    @property
    def fresh(self) -> Positions:
        """Positions of which nothing is reused, ascending."""
        covered = np.arange(self.num_tokens) < self.kept
        for segment in self.segments:
            covered[segment.start : segment.end] = True
        return np.flatnonzero(~covered)

    @property
    def question(self) -> Positions:
        """Positions behind everything reused: what is asked about the chunks. Never empty."""
        return np.arange(self.segments[-1].end if self.segments else self.kept, self.num_tokens, dtype=np.int64)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all chunks that the plan needs."""
        return frozenset(s.key for s in self.segments)


def positions_of(segments: Iterable[Segment]) -> Positions:
    """All positions of `segments`, in their order."""
    parts = [np.arange(s.start, s.end, dtype=np.int64) for s in segments]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def plan_blend(
    num_tokens: int,
    prefix: Sequence[Match],
    chunks: Sequence[Match],
    min_tokens: int = 16,
    kept: int = 0,
    kept_exact: bool = True,
) -> BlendPlan:
    """Lay out a prompt.

    Args:
        num_tokens: Length of the prompt.
        prefix: Matches whose values are exact at their place (the head, a first chunk cached behind that head).
        chunks: Other matches; where they overlap an exact one they are trimmed to what is left.
        min_tokens: Shorter remainders are not worth a segment.
        kept: Tokens at the start that come from an earlier prompt; matches are trimmed to what is behind them.
        kept_exact: Whether they are exact; if not, nothing behind them is.

    Returns:
        The plan. The prompt's last token is never reused: its logits are what the prefill is for.
    """
    taken = np.zeros(num_tokens, dtype=bool)
    taken[num_tokens - 1 :] = True
    taken[:kept] = True
    segments: list[Segment] = []
    for match, exact in [*((m, True) for m in prefix), *((m, False) for m in chunks)]:
        least = 1 if exact else min_tokens
        for start, end in _free_runs(taken, match.start, match.end):
            if end - start >= least:
                taken[start:end] = True
                is_exact = exact and kept_exact
                segments.append(Segment(start, end, match.key, match.offset + start - match.start, is_exact))
    return BlendPlan(num_tokens, tuple(sorted(segments, key=lambda s: s.start)), kept, kept_exact)


def _free_runs(taken: npt.NDArray[np.bool_], start: int, end: int) -> list[tuple[int, int]]:
    free = np.concatenate(([False], ~taken[start:end], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(free)) + start
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
