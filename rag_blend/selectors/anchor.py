"""Recompute the tokens that the question attends to and that depend on their context: the default."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions, positions_of
from rag_blend.selectors.base import AttentionSelector, Scores, probe_rows, share_of, top

_DEAR = 0.02  # of computing all reusable tokens: a look ahead that costs more is not worth it
_FIRST_TOKENS = 8


class AnchorSelector(AttentionSelector):
    """Question attention times the root of the staleness: where it matters, and where the stored rows are wrong.

    Staleness costs nothing here: it is what the chunk's caches behind different texts disagreed on at ingestion. For
    short prompts the look ahead is too dear: then, unless the caller names a ratio, the first tokens of each segment
    are recomputed as by `heads`, for no more than the default work.
    """

    def looks_ahead(self, plan: BlendPlan, ratio: float | None) -> bool:
        """With a given ratio, or if the look ahead is less than 2 % of the work on reusable tokens."""
        return ratio is not None or probe_rows(plan) < _DEAR * len(plan.reusable)

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """The first 8 tokens of every segment; fewer if those were more than the default work."""
        each = share_of(len(plan.reusable), self.default_work) // max(1, len(plan.blended))
        return positions_of(segment.head(min(_FIRST_TOKENS, each)) for segment in plan.blended)

    def select_by_attention(
        self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores
    ) -> Positions:
        """The top share of the reusable tokens."""
        return top(plan.reusable, received * np.sqrt(staleness), self.num_chosen(plan, ratio))
