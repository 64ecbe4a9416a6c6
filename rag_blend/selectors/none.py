"""Recompute nothing."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import EMPTY, TokenSelector


class NoneSelector(TokenSelector):
    """Pure reuse ("full KV reuse" in the CacheBlend paper): the fastest, and the lower bound of quality."""

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """No token, whatever the ratio."""
        return EMPTY
