"""One prompt: look for stored chunks, plan, and run the model on a cache that blends them in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from rag_blend.blend import BlendPass
from rag_blend.cache import BlendCache, kv_of
from rag_blend.catalog import ChunkCatalog, Findings
from rag_blend.chunk import LayerKV
from rag_blend.control import Controller
from rag_blend.errors import CorruptChunkError, GenerationCancelledError
from rag_blend.generation import GenerationStats
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan, Positions
from rag_blend.prefetch import LayerPrefetcher, LostChunkError
from rag_blend.prefixes import Prefix, PrefixCache, Recipe
from rag_blend.probe import ProbePass
from rag_blend.rows import LayerSource
from rag_blend.selectors import AttentionSelector, TokenSelector, selector_of
from rag_blend.selectors.all import AllSelector
from rag_blend.shift import ChunkShift
from rag_blend.space import OwnSpace, Space
from rag_blend.store import KVStore
from rag_blend.trace import TraceRecorder
from rag_blend.work import expected_rows

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = Callable[[BlendCache], tuple[T, Sequence[int]]]
_HIGHEST_RAISED_RATIO = 0.9  # at 1 the store would not be used at all


@dataclass(frozen=True, slots=True)
class BlendPolicy:
    """How a prompt is treated.

    Attributes:
        selector: Chooses the reusable tokens to recompute.
        ratio: Share of them; None is the selector's default.
        reuse: False: plain full prefill.
        may_raise: Whether more tokens may be recomputed where that costs no time.
    """

    selector: TokenSelector
    ratio: float | None = None
    reuse: bool = True
    may_raise: bool = False

    @classmethod
    def of(
        cls, selector: str | TokenSelector, ratio: float | None, reuse: bool = True, may_raise: bool = False
    ) -> BlendPolicy:
        """Check and resolve what a user asked for.

        Raises:
            ValueError: The ratio is not between 0 and 1, no selector has this name, or it both drops and shifts rows.
        """
        if ratio is not None and not 0.0 <= ratio <= 1.0:
            raise ValueError(f"recompute_ratio must lie between 0 and 1, got {ratio}")
        acting = selector_of(selector)
        if acting.shifts_rest and acting.check_layer is not None:
            raise ValueError(f"{type(acting).__name__} has shifts_rest and a check_layer; it may have one of them")
        return cls(acting, ratio, reuse, may_raise)

    @property
    def recomputes_everything(self) -> bool:
        """Whether nothing at all may come from the store: ratio 1, whatever the selector, or `all`."""
        return self.ratio == 1.0 or isinstance(self.selector, AllSelector)

    @property
    def is_check(self) -> bool:
        """Whether the prompt is to be computed whatever is known of it, to see what full prefill says."""
        return not self.reuse or self.recomputes_everything

    @property
    def recipe(self) -> Recipe:
        """Tells two policies apart that may choose other tokens."""
        return self.selector, self.ratio

    @property
    def acting_selector(self) -> TokenSelector:
        """The selector that does it."""
        return AllSelector() if self.recomputes_everything else self.selector


class PromptRunner:
    """Runs the model on prompts. Not thread-safe: the engine serialises.

    Args:
        adapter: The model.
        store: Where stored rows come from.
        control: Knows how long things take: what is worth reusing, and how long the store is worth waiting for.
        prefixes: Earlier prompts, to which this one may be added. None: neither is done.
    """

    def __init__(
        self, adapter: ModelAdapter, store: KVStore, control: Controller, prefixes: PrefixCache | None = None
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._control = control
        self._prefixes = PrefixCache(0) if prefixes is None else prefixes

    def run(
        self,
        ids: np.ndarray,
        catalog: ChunkCatalog,
        policy: BlendPolicy,
        call: Call[T],
        record: TraceRecorder,
        room: int = 0,
        cancel: threading.Event | None = None,
        keep_blend: bool = False,
        seat: Space | None = None,
    ) -> tuple[T, GenerationStats]:
        """Let `call` run the model over a prompt with a cache that blends.

        Args:
            ids: The prompt, int32, shape (num_tokens,).
            catalog: Chunks that may be used; those that prove to be gone or damaged are removed from it.
            policy: How to treat the prompt.
            call: Runs the model's forward or `generate` on the whole prompt with the given cache; returns a value and
                the ids of prompt and answer. It is called again if a chunk turns out to be damaged during the prefill.
            record: Is told what happens.
            room: How many tokens will be decoded.
            cancel: Checked before each layer.
            keep_blend: Keep the prompt even if it was blended.
            seat: Where the prompt's rows are to lie. None: in memory of their own.

        Returns:
            The value that `call` returned, and the prompt's stats without `ttft_s`.
        """
        record.turn("plan")
        space = seat or OwnSpace(room)
        prefixes = PrefixCache(0) if policy.is_check else self._prefixes
        frequencies = self._adapter.rotary.frequencies(len(ids), self._adapter.device)
        kept = prefixes.find(ids, frequencies, policy.recipe)
        self._store.backend.limit_calls(self._control.wait_for(len(ids)))
        lost: set[str] = set()
        while True:
            possible, found = self._plan(ids, catalog, policy, kept, lost)
            lost.update(found.lost)
            places = self._store.places_of(possible.keys)
            plan, acting = self._worthwhile(possible, policy, places)
            record.plan(plan, found, possible)
            if cancel is not None and cancel.is_set():  # while the store was waited for
                raise GenerationCancelledError("cancelled before the prefill")
            try:
                value, token_ids, cache, stats = self._run_plan(
                    ids, plan, places, kept, acting, call, space, cancel, record
                )
            except LostChunkError as error:
                record.turn("plan")
                record.lose(error.gone | error.silent, damaged=isinstance(error.__cause__, CorruptChunkError))
                lost |= error.gone | error.silent
                catalog.remove(error.gone)
                continue
            if plan.is_exact:
                self._keep(prefixes, token_ids, cache, Prefix(ids, (), frequencies))
            elif keep_blend:
                self._keep(prefixes, token_ids, cache, Prefix(ids, (), frequencies, policy.recipe, len(ids) - 1))
            elsewhere, declined = len(found.elsewhere), len(possible.keys - plan.keys)
            return value, replace(stats, misses=len(lost) + elsewhere, misses_elsewhere=elsewhere, declined=declined)

    def _keep(self, prefixes: PrefixCache, token_ids: Sequence[int], cache: BlendCache, prompt: Prefix) -> None:
        """Keep what the cache holds of a prompt and its answer, if it is just that."""
        length = cache.get_seq_length()
        if not 0 <= len(token_ids) - length <= 1:  # an answer's last token has no row; assisted decoding may have more
            return
        if not torch.equal(prompt.frequencies, self._adapter.rotary.frequencies(length, self._adapter.device)):
            return  # the answer has made the prompt so long that its rows have other angles
        layers = [kv_of(cache, layer_idx) for layer_idx in range(self._adapter.num_layers)]
        if len(layers[0].keys) == 1:  # beams are several
            rows = [LayerKV(kv.keys[0], kv.values[0]) for kv in layers]
            prefixes.keep(replace(prompt, token_ids=np.asarray(token_ids[:length], dtype=np.int32), layers=rows))

    def _plan(
        self, ids: np.ndarray, catalog: ChunkCatalog, policy: BlendPolicy, kept: Prefix, lost: AbstractSet[str]
    ) -> tuple[BlendPlan, Findings]:
        """What to reuse, and all that was found; what could not be had besides the `lost` is among it."""
        if not policy.reuse:
            return BlendPlan(len(ids), ()), Findings([], [], [], [])
        found = catalog.find(ids, without=lost)
        if found.elsewhere:
            logger.info(
                "%d stored chunks lie in this prompt but were cached behind another head, so they are not reused; "
                "ingest them with this prompt's head, or use any_head=True", len(found.elsewhere),
            )  # fmt: skip
        same, device = self._adapter.rotary.same_angles, self._adapter.device
        # Where everything is recomputed, so is what would be exact, but for 16-bit storage.
        candidates = [] if policy.recomputes_everything else found.prefix
        whole = [match for match in candidates if same(len(ids), match.end, device=device)]
        return found.plan(len(ids), whole, self._store.is_lossless, len(kept), kept.recipe is None), found

    def _run_plan(
        self,
        ids: np.ndarray,
        plan: BlendPlan,
        places: Mapping[str, str],
        kept: Prefix,
        policy: BlendPolicy,
        call: Call[T],
        space: Space,
        cancel: threading.Event | None,
        record: TraceRecorder,
    ) -> tuple[T, Sequence[int], BlendCache, GenerationStats]:
        adapter = self._adapter
        if not plan.reuses:
            cache = BlendCache(adapter.num_layers, space)
            stats = GenerationStats(prompt_tokens=plan.num_tokens, fresh_tokens=plan.num_tokens)
            record.turn("compute")
            value, token_ids = call(cache)
            self._control.learn_full(plan.num_tokens, cache.prefill_s)
            return value, token_ids, cache, stats
        angles = adapter.rotary.angles(plan.num_tokens, adapter.device)
        record.turn("storage")
        with LayerPrefetcher(plan, self._store, adapter, angles, space, kept=kept.layers) as prefetcher:
            record.turn("select")
            opened_at = time.perf_counter()
            chosen, source, charge = self._select(ids, plan, policy, prefetcher, cancel, record)
            selector = policy.acting_selector
            shift = ChunkShift(adapter, plan, angles, chosen) if selector.shifts_rest and len(chosen) else None
            blend = BlendPass(adapter, plan, chosen, source, selector, policy.ratio, cancel, shift)
            cache = BlendCache(adapter.num_layers, space, blend)
            record.turn("compute")
            with adapter.packing(), adapter.layer_hooks(blend.before_layer, cache):
                value, token_ids = call(cache)
        record.recompute(blend.recomputed)
        computing_s = 0.0  # nobody knows on an accelerator
        if cache.prefill_s:
            computing_s = cache.began_at - opened_at + cache.prefill_s - prefetcher.waited_s
        work = self._control.cost.blend(plan, (blend.computed + charge) / adapter.num_layers, 0.0)
        self._control.learn_blend(work, computing_s, prefetcher.fetches(places))
        return value, token_ids, cache, _stats_of(plan, blend, adapter.num_layers, charge, prefetcher.load_s)

    def _worthwhile(
        self, plan: BlendPlan, policy: BlendPolicy, places: Mapping[str, str]
    ) -> tuple[BlendPlan, BlendPolicy]:
        """As much of a plan as saves time, and a policy that lets the recompute last as long as the fetch."""
        if policy.is_check:
            return plan, policy
        selector, num_layers = policy.acting_selector, self._adapter.num_layers

        def work_of(candidate: BlendPlan) -> float:
            return self._control.cost.blend(candidate, *expected_rows(candidate, selector, policy.ratio, num_layers))

        plan = self._control.best(plan, places, work_of)
        spare = self._control.spare_rows(plan, places, work_of) if policy.may_raise and plan.blended else 0
        if not spare:
            return plan, policy
        chosen, _ = expected_rows(plan, selector, policy.ratio, num_layers)
        return plan, replace(policy, ratio=min(_HIGHEST_RAISED_RATIO, (chosen + spare) / len(plan.reusable)))

    def _select(
        self,
        ids: np.ndarray,
        plan: BlendPlan,
        policy: BlendPolicy,
        prefetcher: LayerPrefetcher,
        cancel: threading.Event | None,
        record: TraceRecorder,
    ) -> tuple[Positions, LayerSource, int]:
        """The tokens to recompute, where the stored rows are now, and the rows that choosing them has cost."""
        selector, source = policy.acting_selector, record.awaited(prefetcher)
        if not isinstance(selector, AttentionSelector):
            return selector.select(plan, policy.ratio), source, 0
        if not len(plan.reusable):
            return plan.reusable, source, 0
        if not self._adapter.can_watch_attention:  # then what is known to be stale decides alone
            alike = np.ones(plan.num_tokens, dtype=np.float32)
            return selector.select_by_attention(plan, policy.ratio, alike, prefetcher.staleness()), source, 0
        probe = ProbePass(self._adapter, plan, source, cancel)
        received, stored = probe.run(torch.from_numpy(ids).long()[None].to(self._adapter.device))
        record.look_ahead(received)
        staleness = prefetcher.staleness()
        chosen = selector.select_by_attention(plan, policy.ratio, received, staleness)
        return chosen, stored, probe.computed


def _stats_of(plan: BlendPlan, blend: BlendPass, num_layers: int, charge: int, load_s: float) -> GenerationStats:
    reusable = len(plan.reusable)
    approximate = reusable if plan.kept_exact else reusable + plan.kept
    computed = blend.computed + charge
    return GenerationStats(
        prompt_tokens=plan.num_tokens,
        prefix_tokens=plan.exact_tokens,
        reused_tokens=approximate - blend.recomputed_tokens,
        recomputed_tokens=blend.recomputed_tokens,
        fresh_tokens=plan.num_tokens - plan.exact_tokens - approximate,
        recompute_ratio=computed / (num_layers * reusable) if reusable else 0.0,
        mode="blend" if approximate else "prefix",
        load_s=load_s,
        hits=len(plan.keys),
    )
