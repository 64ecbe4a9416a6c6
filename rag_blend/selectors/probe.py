"""Recompute the tokens that the question attends to (FusionRAG, arXiv 2601.12904; ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import Attention, AttentionSelector, share_of, top


class ProbeSelector(AttentionSelector):
    """The tokens that receive most attention when the question is run over the stored rows."""

    default_ratio = 0.08

    def select_by_attention(self, plan: BlendPlan, ratio: float | None, received: Attention) -> Positions:
        """The top share (default 8 %) of the reusable tokens."""
        return top(
            plan.reusable, received, share_of(len(plan.reusable), self.default_ratio if ratio is None else ratio)
        )
