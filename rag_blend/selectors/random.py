"""Recompute a random sample: the control that every other selector must beat."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions
from rag_blend.selectors.base import TokenSelector, share_of


class RandomSelector(TokenSelector):
    """A uniform sample of the reusable tokens, the same one for the same prompt layout.

    Args:
        seed: Seed of the sample.
    """

    default_ratio = 0.15

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """A sample of the given share (default 15 %)."""
        reusable = plan.reusable
        count = share_of(len(reusable), self.default_ratio if ratio is None else ratio)
        return np.sort(np.random.default_rng(self.seed).choice(reusable, count, replace=False))
