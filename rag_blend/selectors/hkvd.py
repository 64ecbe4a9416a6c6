"""Recompute the tokens with the highest KV deviation (CacheBlend as published, arXiv 2405.16444, section 4)."""

from __future__ import annotations

import torch

from rag_blend.chunk import LayerKV
from rag_blend.selectors.base import ScoreSelector


class HkvdSelector(ScoreSelector):
    """Everything through layer 0, then the tokens whose values at layer 1 differ most from the stored ones.

    As the released code does: squared L2 distance of the values, one top-k over the whole prompt at layer 1, 15 %.
    Unlike the released code: every recomputed token sees exactly the tokens in front of it, and the question is
    always fresh.
    """

    default_ratio = 0.15

    def score(self, fresh: LayerKV, cached: LayerKV) -> torch.Tensor:
        """Squared L2 distance between fresh and stored values, summed over heads."""
        return (fresh.values.float() - cached.values.float()).pow(2).sum(dim=(0, 2))
