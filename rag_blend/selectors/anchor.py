"""Recompute the first tokens of every chunk, and those that the question attends to."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions, positions_of
from rag_blend.selectors.base import Attention, AttentionSelector, share_of, top


class AnchorSelector(AttentionSelector):
    """Chunk heads, then question attention: where a chunk is wrong, and where it matters.

    Args:
        num_heads: Tokens at the start of each segment.
        attended: Share of the reusable tokens to add by attention, unless the caller names a total ratio.
    """

    def __init__(self, num_heads: int = 8, attended: float = 0.05) -> None:
        self.num_heads = num_heads
        self.attended = attended

    def select_by_attention(self, plan: BlendPlan, ratio: float | None, received: Attention) -> Positions:
        """Heads and the attended share; with a ratio, heads take at most half of it."""
        reusable = plan.reusable
        if ratio is None:
            num_heads, num_attended = self.num_heads, share_of(len(reusable), self.attended)
        else:
            total = share_of(len(reusable), ratio)
            num_heads = min(self.num_heads, total // (2 * max(1, len(plan.blended))))
            num_attended = total - num_heads * len(plan.blended)
        heads = positions_of(segment.head(num_heads) for segment in plan.blended)
        others = np.setdiff1d(reusable, heads, assume_unique=True)
        return np.union1d(heads, top(others, received, num_attended))
