"""How the tokens to recompute are chosen: the easy way (`score`) and the full one (`select`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from rag_blend.chunk import LayerKV
from rag_blend.plan import BlendPlan, Positions

Scores = npt.NDArray[np.float32]  # one per prompt token


class TokenSelector(ABC):
    """Chooses which reusable tokens are computed anew.

    Attributes:
        default_ratio: Share of the reusable tokens to recompute when the caller names none.
        check_layer: A layer (>= 1) before which `refine` may drop tokens, or None.
        shifts_rest: Whether the rows that are not computed are moved as far as those of their chunk that are have moved
            on average; see `ChunkShift`. Engines refuse it beside a check layer.
    """

    default_ratio: float | None = None
    check_layer: int | None = None
    shifts_rest = False

    @abstractmethod
    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """Choose before the first layer.

        Args:
            plan: The prompt's layout.
            ratio: Share of the reusable tokens to recompute, 0 to 1; None leaves it to the selector.

        Returns:
            A subset of `plan.reusable`, ascending. These tokens are computed from layer 0 on.
        """

    def refine(self, fresh: LayerKV, cached: LayerKV, num_kept: int) -> torch.Tensor:
        """Choose once more, before `check_layer`, among the tokens chosen by `select`.

        Args:
            fresh: Their keys and values of the check layer, just computed, (num_kv_heads, num_tokens, head_dim).
            cached: The same rows as they come from the store, keys put at their positions.
            num_kept: How many tokens stay.

        Returns:
            Indices into those rows, any order, shape (num_kept,).
        """
        raise NotImplementedError(f"{type(self).__name__} has no check layer")


class ScoreSelector(TokenSelector):
    """Computes every reusable token up to `check_layer` and keeps those that score highest there."""

    check_layer = 1

    @abstractmethod
    def score(self, fresh: LayerKV, cached: LayerKV) -> torch.Tensor:
        """How much each token needs recomputing, shape (num_tokens,); see `TokenSelector.refine`."""

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """Everything: scores can only be had by computing the first layers in full."""
        return plan.reusable

    def refine(self, fresh: LayerKV, cached: LayerKV, num_kept: int) -> torch.Tensor:
        """The `num_kept` tokens with the highest score."""
        return torch.topk(self.score(fresh, cached), num_kept).indices


class AttentionSelector(TokenSelector):
    """Chooses by the attention that tokens receive from the question, found by a cheap pass over the stored rows."""

    shifts_rest = True

    def num_chosen(self, plan: BlendPlan, ratio: float | None) -> int:
        """How many tokens to choose: the ratio's share, or what the pass has left of the default work."""
        reusable = len(plan.reusable)
        if ratio is not None:
            return share_of(reusable, ratio)
        left = default_work(reusable) - probe_rows(plan) * 3 // 4  # it ends after 3/4 of the layers
        return max(left, share_of(reusable, _LEAST_SHARE))

    @abstractmethod
    def select_by_attention(
        self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores
    ) -> Positions:
        """Like `select`, knowing what the question looks at.

        Args:
            plan: The prompt's layout.
            ratio: See `select`.
            received: Attention that each prompt token receives, float32, shape (num_tokens,).
            staleness: How much each token's stored rows depend on what stood in front of the chunk when it was
                cached, see `ChunkKV.staleness`; 1 where it is unknown. Like `received`.
        """

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        """Not possible without a look ahead."""
        raise NotImplementedError(f"{type(self).__name__} needs a look ahead")


# The pass runs the last tokens of a prompt: there stands the question proper. 32 of them choose as well as all 75 of
# the question with its instructions.
PROBE_ROWS = 32
_LEAST_SHARE = 0.02
_MOST_WORK = 0.095
_WORK_BY_ROOT = 3.0


def default_work(num_reusable: int) -> int:
    """How many rows an `AttentionSelector` computes unless the caller names a ratio, those of its pass included.

    A share of the reusable tokens, so that short prompts, for which the pass is dear, do not cost more than they are
    worth; but beyond a thousand tokens the share falls, for what a question needs grows more slowly than the prompt.
    """
    return min(share_of(num_reusable, _MOST_WORK), math.ceil(_WORK_BY_ROOT * math.sqrt(num_reusable)))


def probe_rows(plan: BlendPlan) -> int:
    """How many rows the look ahead runs."""
    return min(PROBE_ROWS, len(plan.question))


def top(candidates: Positions, scores: Scores, count: int) -> Positions:
    """The `count` candidates with the highest scores, ascending."""
    best = np.argsort(-scores[candidates], kind="stable")[:count]
    return np.sort(candidates[best])


def share_of(count: int, ratio: float) -> int:
    """`ratio` of `count` tokens, rounded up."""
    return min(count, math.ceil(count * ratio))


EMPTY: Positions = np.empty(0, dtype=np.int64)
