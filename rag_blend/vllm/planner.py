"""What of a prompt is stored, found in threads of its own: vLLM's scheduler never waits for a store."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rag_blend.listing import empty_catalog, usable_chunks
from rag_blend.plan import BlendPlan, Positions
from rag_blend.primer import Primer
from rag_blend.runner import BlendPolicy
from rag_blend.selectors import AttentionSelector, TokenSelector, selector_names, selector_of
from rag_blend.storage import StorageBackend
from rag_blend.store import KVStore
from rag_blend.vllm.options import Options
from rag_blend.vllm.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """A prompt's beginning, up to the last stored token, and how it is to be had.

    Attributes:
        token_ids: Of that beginning, int32, shape (num_tokens,).
        layout: What stored chunks cover of it.
        chosen: Covered positions that are computed nevertheless, from layer 0 on, ascending.
        policy: By which they were chosen.
    """

    token_ids: np.ndarray
    layout: BlendPlan
    chosen: Positions
    policy: BlendPolicy

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def rows(self) -> Positions:
        """All positions that are computed, ascending: `chosen`, and what nothing covers."""
        return np.union1d(self.layout.fresh, self.chosen)


def policy_of(recipe: Recipe) -> BlendPolicy:
    """How the recipe treats a prompt.

    Raises:
        ValueError: There is no such selector, vLLM has not what it needs, or the ratio is none.
    """
    policy = BlendPolicy.of(recipe.selector, recipe.recompute_ratio)
    if not is_servable(policy.selector):
        able = [name for name in selector_names() if is_servable(selector_of(name))]
        raise ValueError(
            f"selector {recipe.selector!r} must see what a question attends to, or move rows while layers run, which "
            f"vLLM's kernels do not allow; use one of {', '.join(able)}"
        )
    return policy


def is_servable(selector: TokenSelector) -> bool:
    """Whether vLLM can do what a selector needs."""
    return not (isinstance(selector, AttentionSelector) or selector.shifts_rest)


class PromptPlanner:
    """Looks prompts up in the stores of all tenants.

    Args:
        backend: Where chunks are.
        fingerprint: Digest of the model's `ModelFingerprint`.
        kv_dtype: Dtype of stored keys and values.
        tokenizer: The model's.
        options: The connector's.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: str,
        kv_dtype: torch.dtype,
        tokenizer: PreTrainedTokenizerBase,
        options: Options,
    ) -> None:
        self._backend = backend
        self._tenants = {
            name: _Tenant(KVStore(backend, fingerprint, name, kv_dtype), tokenizer, options)
            for name in options.namespaces
        }
        self._refresh_s = options.refresh_s
        self._refreshed_at = time.monotonic()
        # A catalog is for one thread only, so all look-ups share one; looking through a store must not hold them up.
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="rag-blend-lookup")
        self._scans = ThreadPoolExecutor(1, thread_name_prefix="rag-blend-scan")

    def check(self, recipe: Recipe) -> None:
        """Whether prompts can be treated so here.

        Raises:
            ValueError: They cannot; the text says what can be done.
        """
        policy_of(recipe)
        if recipe.namespace not in self._tenants:
            raise ValueError(f"namespace {recipe.namespace!r} is not among the server's namespaces")

    def submit(
        self, token_ids: np.ndarray, recipe: Recipe, without: AbstractSet[str] = frozenset()
    ) -> Future[PromptPlan | None]:
        """Look a prompt up; the result is None when nothing of it is stored.

        Args:
            token_ids: The whole prompt, int32, shape (num_tokens,).
            recipe: One that passed `check`.
            without: Keys of chunks that are not to be used.
        """
        now = time.monotonic()
        if now - self._refreshed_at > self._refresh_s:
            self._refreshed_at = now
            self._scans.submit(self._refresh)
        return self._lookups.submit(self._tenants[recipe.namespace].plan, token_ids, recipe, without)

    def remove(self, namespace: str, keys: Iterable[str]) -> None:
        """Forget chunks that proved to be gone or damaged."""
        self._lookups.submit(self._tenants[namespace].remove, list(keys))

    def close(self) -> None:
        """Stop and release the store; what is still to be looked up is dropped."""
        self._lookups.shutdown(cancel_futures=True)
        self._scans.shutdown(cancel_futures=True)
        self._backend.close()

    def _refresh(self) -> None:
        for name, tenant in self._tenants.items():
            try:
                tenant.refresh()
            except Exception:  # nobody waits for it, so nobody else would say so
                logger.exception("namespace %r was not looked through, what was known of it is still used", name)


class _Tenant:
    """The chunks of one namespace."""

    def __init__(self, store: KVStore, tokenizer: PreTrainedTokenizerBase, options: Options) -> None:
        self._store = store
        self._any_head = options.any_head
        self._primer = Primer(*options.priming, tokenizer, store)
        self.refresh()
        if not len(self._catalog):
            logger.warning(
                "no stored chunk of namespace %r can be used: none was ingested with this model in this dtype and "
                "with this priming; see docs/vllm.md", store.namespace,
            )  # fmt: skip

    def refresh(self) -> None:
        """Look through the store; look-ups go on with what was known until it is done."""
        self._primer.reload()
        catalog = empty_catalog(self._store, self._primer, self._any_head)
        catalog.add_all(usable_chunks(self._store, self._primer))
        self._catalog = catalog

    def remove(self, keys: Iterable[str]) -> None:
        self._catalog.remove(keys)

    def plan(self, token_ids: np.ndarray, recipe: Recipe, without: AbstractSet[str]) -> PromptPlan | None:
        policy = policy_of(recipe)
        found = self._catalog.find(token_ids, without)
        whole = [] if policy.recomputes_everything else found.prefix
        plan = found.plan(len(token_ids), whole, self._store.is_lossless)
        if not plan.segments:
            return None
        chosen = policy.acting_selector.select(plan, policy.ratio)
        end = plan.segments[-1].end
        return PromptPlan(token_ids[:end], BlendPlan(end, plan.segments), chosen, policy)
