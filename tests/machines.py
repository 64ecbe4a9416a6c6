"""Machines and stores whose every time is a formula, to see what a controller makes of them. No clock, no sleeping."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from rag_blend.control import Controller, ModelCost
from rag_blend.plan import BlendPlan

Fetch = tuple[str, int, int, float]
RECOMPUTED = 0.1  # share of the reusable tokens


@dataclass(frozen=True)
class Store:
    """A place: seconds until an entry's first row arrives, all layers together, and seconds for each token's rows."""

    latency_s: float
    token_s: float


@dataclass
class Machine:
    """Passes take an overhead and a time for each FLOP; what is measured is off by up to `noise`, a share."""

    cost: ModelCost
    stores: Mapping[str, Store]
    flops_per_s: float = 1e11
    full_overhead_s: float = 0.02
    blend_overhead_s: float = 0.06
    blend_flops_per_s: float = 0.8e11  # rows with gaps between them
    parallel_reads: int = 1
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def work_of(self, plan: BlendPlan) -> float:
        """FLOPs of a plan."""
        return _work_of(self.cost, plan)

    def full_s(self, tokens: int) -> float:
        """Seconds of a full prefill."""
        return self.full_overhead_s + self.cost.prefill(tokens) / self.flops_per_s

    def computing_s(self, plan: BlendPlan) -> float:
        """Seconds of computing a blend."""
        return self.blend_overhead_s + self.work_of(plan) / self.blend_flops_per_s

    def fetches(self, plan: BlendPlan, places: Mapping[str, str]) -> list[Fetch]:
        """From which place come how many entries and tokens, in how many seconds."""
        found = []
        for place in {places[key] for key in plan.keys}:
            entries = sum(places[key] == place for key in plan.keys)
            tokens = sum(len(s) for s in plan.segments if places[s.key] == place)
            rounds = -(-entries // self.parallel_reads)
            store = self.stores[place]
            found.append((place, entries, tokens, rounds * store.latency_s + tokens * store.token_s))
        return found

    def seconds(self, plan: BlendPlan, places: Mapping[str, str]) -> float:
        """How long the prompt's first token really takes."""
        if not plan.reuses:
            return self.full_s(plan.num_tokens)
        fetching = sum(seconds for *_, seconds in self.fetches(plan, places))
        return max(self.computing_s(plan), fetching) + fetching / self.cost.num_layers

    def answer(self, controller: Controller, plan: BlendPlan, places: Mapping[str, str]) -> BlendPlan:
        """Do what the controller decides, let it learn what it took, and return what was done."""
        done = controller.best(plan, places, self.work_of)
        if not done.reuses:
            controller.learn_full(done.num_tokens, self._noisy(self.full_s(done.num_tokens)))
        else:
            fetches = [(p, entries, tokens, self._noisy(s)) for p, entries, tokens, s in self.fetches(done, places)]
            controller.learn_blend(self.work_of(done), self._noisy(self.computing_s(done)), fetches)
        return done

    def _noisy(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)


@lru_cache
def _work_of(cost: ModelCost, plan: BlendPlan) -> float:
    return cost.blend(plan, RECOMPUTED * len(plan.reusable), 0.0)
