"""Recompute the tokens that the question attends to (FusionRAG, arXiv 2601.12904; ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import AttentionSelector, Scores, top


class ProbeSelector(AttentionSelector):
    """The tokens that receive most attention when the question is run over the stored rows."""

    def select_by_attention(
        self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores
    ) -> Positions:
        """The top share of the reusable tokens."""
        return top(plan.reusable, received, self.num_chosen(plan, ratio))
