"""Recompute the tokens that the question attends to and that depend on their context: the default."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import AttentionSelector, Scores, top


class AnchorSelector(AttentionSelector):
    """Question attention times the root of the staleness: where it matters, and where the stored rows are wrong.

    Staleness costs nothing here: it is what the chunk's caches behind different texts disagreed on at ingestion.
    """

    def select_by_attention(
        self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores
    ) -> Positions:
        """The top share of the reusable tokens."""
        return top(plan.reusable, received * np.sqrt(staleness), self.num_chosen(plan, ratio))
