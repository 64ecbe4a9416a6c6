"""The scheduler's half of the connector: which requests are blended, and what their workers are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_blend.selectors import selector_of
from rag_blend.selectors.base import share_of
from rag_blend.vllm.messages import BlendJob, BlendMetadata, LostChunks
from rag_blend.vllm.options import secret
from rag_blend.vllm.planner import PromptPlan, PromptPlanner
from rag_blend.vllm.recipe import Recipe, recipe_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wish:
    """A request that asks for stored chunks.

    Attributes:
        recipe: How.
        token_ids: Its prompt, int32.
        lookup: What is stored of it.
        without: Chunks that could not be read for it.
        start: In front of this position nothing was blended for it: vLLM had it. None: nothing was blended at all.
    """

    recipe: Recipe
    token_ids: np.ndarray
    lookup: Future[PromptPlan | None]
    without: frozenset[str] = frozenset()
    start: int | None = None


class BlendScheduler:
    """Requests come with a recipe and its salt, or they are served as if nothing were stored.

    Args:
        planner: Looks prompts up.
        fingerprint: Digest of the model's `ModelFingerprint`.
        num_ranks: Tensor parallel ranks.
    """

    def __init__(self, planner: PromptPlanner, fingerprint: str, num_ranks: int) -> None:
        self._planner = planner
        self._fingerprint = fingerprint
        self._num_ranks = num_ranks
        self._secret = secret()
        self._wishes: dict[str, _Wish] = {}
        self._jobs: list[BlendJob] = []

    def arrived(self, request: Request) -> None:
        """Begin to look a new request up, if it may be blended."""
        try:
            recipe = self._recipe(request)
        except ValueError as error:
            logger.warning("a request is served without stored chunks: %s", error)
            return
        if recipe is not None:
            token_ids = np.asarray(request.prompt_token_ids, dtype=np.int32)
            lookup = self._planner.submit(token_ids, recipe)
            self._wishes[request.request_id] = _Wish(recipe, token_ids, lookup)

    def num_blendable(self, request: Request, num_computed: int) -> int | None:
        """Tokens behind the first `num_computed` that can be blended; None while that is not known yet."""
        wish = self._wishes.get(request.request_id)
        if wish is None:
            return 0
        if not wish.lookup.done():
            return None
        plan = self._plan(wish)
        return 0 if plan is None else max(0, len(plan) - num_computed)

    def allocated(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """There are blocks for what `num_blendable` promised: have them filled."""
        wish = self._wishes[request.request_id]
        plan = self._plan(wish)
        assert plan is not None
        wish.start = len(plan) - num_tokens
        self._jobs.append(
            BlendJob(
                request_id=request.request_id,
                namespace=wish.recipe.namespace,
                token_ids=plan.token_ids,
                layout=plan.layout,
                rows=plan.rows,
                selector=wish.recipe.selector,
                num_kept=_num_kept(plan, wish.start),
                start=wish.start,
                block_ids=block_ids,
            )
        )

    def take_metadata(self) -> BlendMetadata:
        """What the workers are told in this step."""
        jobs, self._jobs = self._jobs, []
        return BlendMetadata(self._fingerprint, jobs)

    def lost(self, lost: Mapping[str, LostChunks]) -> None:
        """Look requests up again whose chunks could not be read."""
        for request_id, chunks in lost.items():
            wish = self._wishes.get(request_id)
            if wish is None:  # aborted meanwhile
                continue
            self._planner.remove(wish.recipe.namespace, chunks.gone)
            wish.without |= chunks.gone | chunks.silent
            wish.start = None
            wish.lookup = self._planner.submit(wish.token_ids, wish.recipe, wish.without)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; what the response's `kv_transfer_params` say about it."""
        wish = self._wishes.pop(request.request_id, None)
        if wish is None:
            return None
        wish.lookup.cancel()
        plan = self._plan(wish) if wish.start is not None else None
        return {"rag_blend": _counts(plan, wish.start or 0)}

    def close(self) -> None:
        """Stop looking up."""
        self._planner.close()

    def _recipe(self, request: Request) -> Recipe | None:
        recipe = recipe_of(request.kv_transfer_params, request.cache_salt, self._secret)
        if recipe is None:
            return None
        self._planner.check(recipe)
        if self._num_ranks > 1 and selector_of(recipe.selector).check_layer is not None:
            raise ValueError(f"selector {recipe.selector!r} compares all heads, but each rank has some of them")
        if request.skip_reading_prefix_cache:
            raise ValueError("it asks for something of every prompt token (prompt_logprobs, or no use of the cache)")
        return recipe

    def _plan(self, wish: _Wish) -> PromptPlan | None:
        """What was found; a look-up that failed found nothing."""
        if not wish.lookup.done() or wish.lookup.cancelled():
            return None
        error = wish.lookup.exception()
        if error is not None:
            logger.error("a look-up failed, its request is served without stored chunks", exc_info=error)
            wish.lookup = Future()
            wish.lookup.set_result(None)
        return wish.lookup.result()


def _num_kept(plan: PromptPlan, start: int) -> int | None:
    selector, ratio = plan.policy.acting_selector, plan.policy.ratio
    if selector.check_layer is None:
        return None
    ratio = selector.default_ratio if ratio is None else ratio
    return share_of(int((plan.layout.reusable >= start).sum()), ratio or 0.0)


def _counts(plan: PromptPlan | None, start: int) -> dict[str, int]:
    """Tokens of the prompt that were not computed thanks to the store, and those that were although it covers them."""
    if plan is None:
        return {"reused_tokens": 0, "recomputed_tokens": 0}
    covered = sum(s.end - max(s.start, start) for s in plan.layout.segments if s.end > start)
    kept = _num_kept(plan, start)
    recomputed = int((plan.chosen >= start).sum()) if kept is None else kept
    return {"reused_tokens": covered - recomputed, "recomputed_tokens": recomputed}
