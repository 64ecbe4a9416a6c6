"""Recompute the tokens that the question attends to (FusionRAG, arXiv 2601.12904; ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import AttentionSelector, Scores, share_of, top


class ProbeSelector(AttentionSelector):
    """The tokens that receive most attention when the question is run over the stored rows."""

    default_ratio = 0.07

    def select_by_attention(
        self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores
    ) -> Positions:
        """The top share (default 7 %) of the reusable tokens."""
        count = share_of(len(plan.reusable), self.default_ratio if ratio is None else ratio)
        return top(plan.reusable, received, count)
