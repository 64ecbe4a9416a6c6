"""Recompute a few tokens of every chunk: its first ones, and others at equal distances."""

from __future__ import annotations

import numpy as np

from rag_blend.plan import BlendPlan, Positions, Segment
from rag_blend.selectors.base import EMPTY, TokenSelector, share_of

_FIRST = 4


class SpreadSelector(TokenSelector):
    """The first tokens change most when a chunk moves; those at equal distances tell how far the others are shifted.

    Costs no selection pass, like `heads`, and the choice is known before anything is loaded.

    Args:
        num_tokens: How many tokens of each segment, unless the caller names a ratio; the first four among them.
    """

    shifts_rest = True

    def __init__(self, num_tokens: int = 8) -> None:
        self.num_tokens = num_tokens

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """`num_tokens` (or a share of `ratio`) of every segment."""
        chosen = [
            _spread(segment, min(len(segment), self.num_tokens) if ratio is None else share_of(len(segment), ratio))
            for segment in plan.blended
        ]
        return np.concatenate(chosen) if chosen else EMPTY


def _spread(segment: Segment, count: int) -> Positions:
    first = min(count, _FIRST)
    # In the middle of equal parts of what is left.
    parts = np.linspace(segment.start + first, segment.end, count - first, endpoint=False)
    half = (len(segment) - first) / (2 * max(count - first, 1))
    others = (parts + half).astype(np.int64)
    return np.concatenate([np.arange(segment.start, segment.start + first, dtype=np.int64), others])
