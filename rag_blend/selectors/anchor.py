"""Recompute the first tokens of every chunk, and those that the question attends to."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import Attention, AttentionSelector, share_of, top
from rag_blend.selectors.heads import HeadsSelector


class AnchorSelector(AttentionSelector):
    """Chunk heads, then question attention: where a chunk is wrong, and where it matters.

    Args:
        num_heads: Tokens at the start of each segment.
    """

    default_ratio = 0.06

    def __init__(self, num_heads: int = 8) -> None:
        self._heads = HeadsSelector(num_heads)

    def select_by_attention(self, plan: BlendPlan, ratio: float | None, received: Attention) -> Positions:
        """Heads, and as many attended tokens as the share (default 6 %) leaves room for."""
        heads = self._heads.select(plan, None)
        budget = share_of(len(plan.reusable), self.default_ratio if ratio is None else ratio)
        others = np.setdiff1d(plan.reusable, heads, assume_unique=True)
        if budget <= len(heads):
            return heads[:budget]
        return np.union1d(heads, top(others, received, budget - len(heads)))
