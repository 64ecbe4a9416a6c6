"""Recompute the first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions, Segment, positions_of
from rag_blend.selectors.base import TokenSelector, share_of


class HeadsSelector(TokenSelector):
    """The first tokens of every segment: those see least of their own chunk, so they change most when it moves.

    Costs no selection pass, and the choice is known before anything is loaded.

    Args:
        num_tokens: How many tokens of each segment, unless the caller names a ratio.
    """

    def __init__(self, num_tokens: int = 8) -> None:
        self.num_tokens = num_tokens

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """The first `num_tokens` (or the first `ratio`) of every segment."""
        return positions_of(self._head(segment, ratio) for segment in plan.blended)

    def _head(self, segment: Segment, ratio: float | None) -> Segment:
        count = self.num_tokens if ratio is None else share_of(len(segment), ratio)
        end = min(segment.end, segment.start + count)
        return Segment(segment.start, end, segment.key, segment.offset, segment.exact)
