"""Recompute the first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions, positions_of
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
        if ratio is None:
            return positions_of(segment.head(self.num_tokens) for segment in plan.blended)
        return positions_of(segment.head(share_of(len(segment), ratio)) for segment in plan.blended)
