"""Recompute everything."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import TokenSelector


class AllSelector(TokenSelector):
    """Full prefill through the blending code: the upper bound of quality, and the test of the code."""

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """Every reusable token, whatever the ratio."""
        return plan.reusable
