"""Is it worth blending this prompt, and how much recompute hides behind the fetch? A cost model learnt while running.

A blend takes as long as the longer of computing and fetching, and one layer more (CacheBlend, arXiv 2405.16444,
section 5: the loading controller); it is declined where full prefill would be about as fast, for that is exact. How
long a pass over the model takes is read off earlier passes of about the same work; a fetch, off recent ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

from rag_blend.plan import BlendPlan

Work = Callable[[BlendPlan], float]
ReuseWhen = Literal["faster", "possible"]

LONGEST_WAIT_S = 1.0  # for one call to a store
_SHORTEST_WAIT_S = 0.05  # or a first connection would never come about
_WAIT_SHARE = 0.5  # of the time that computing the rows again would take
_WORTH = 0.9  # of the time of a full prefill: a blend that saves less is not worth its approximation
_MOST_WORK = 0.8  # of a full prefill: rows with gaps between them take longer than as many in one piece
_MEMORY_S = 300.0  # what was slow five minutes ago gets another chance
_OCTAVE = 2.0  # so far apart passes are told apart
_REMEMBERED = 5  # observations of a kind
_ENOUGH = 2  # observations that tell whether a blend or a store is slow; the first of anything often is
_FEWEST_TOKENS = 64  # fewer say more about overhead than about tokens


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model computes for a token.

    Attributes:
        flops_per_row: In all layers, attention scores apart.
        flops_per_pair: Of one token attending to one other, in all layers.
        num_layers: Number of decoder layers.
    """

    flops_per_row: float
    flops_per_pair: float
    num_layers: int

    def prefill(self, tokens: int) -> float:
        """FLOPs of a prompt's full prefill."""
        return tokens * (self.flops_per_row + (tokens + 1) / 2 * self.flops_per_pair)

    def blend(self, plan: BlendPlan, chosen: float, looking: float) -> float:
        """FLOPs of a blend.

        Args:
            plan: The prompt's layout.
            chosen: How many reusable tokens are computed; their places are not known yet.
            looking: How many tokens the choice computes through all layers, or rather parts of more tokens.
        """
        fresh, reusable = plan.fresh, plan.reusable
        pairs = float((fresh + 1).sum())
        if len(reusable):
            pairs += (chosen + looking) * float((reusable + 1).mean())
        return (len(fresh) + chosen + looking) * self.flops_per_row + pairs * self.flops_per_pair


class Recent:
    """A number as it was seen the last few times; the lower median, since a hiccup only ever makes things slower.

    Args:
        at_least: As long as it was seen less often, it is unknown.
        memory_s: What is older is forgotten. None: nothing is.
    """

    def __init__(self, at_least: int = 1, memory_s: float | None = None) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._at_least = at_least
        self._memory_s = memory_s

    def see(self, value: float) -> None:
        """Take it in."""
        self._seen.append((value, time.monotonic()))

    @property
    def value(self) -> float | None:
        """The number; None while it is unknown."""
        oldest = -math.inf if self._memory_s is None else time.monotonic() - self._memory_s
        seen = [value for value, at in list(self._seen) if at >= oldest]
        return statistics.median_low(seen) if len(seen) >= self._at_least else None


class PassTimes:
    """How long passes took, by the work they did. Thread-safe.

    Args:
        at_least: How many passes of about the same work tell something.
        memory_s: What is older is forgotten. None: nothing is.
    """

    def __init__(self, at_least: int = 1, memory_s: float | None = None) -> None:
        self._new_size = partial(Recent, at_least, memory_s)
        self._sizes: dict[int, tuple[float, Recent]] = {}  # by log2 of FLOPs: the last pass's, and seconds per FLOP

    def learn(self, flops: float, seconds: float) -> None:
        """Take in one pass. One that nobody could time (0 s) teaches nothing."""
        if flops > 0 and seconds > 0:
            size = round(math.log2(flops))
            recent = self._sizes[size][1] if size in self._sizes else self._new_size()
            recent.see(seconds / flops)
            self._sizes[size] = (flops, recent)

    def seconds(self, flops: float) -> float | None:
        """How long a pass takes: what those of about this size took. None while nothing is known.

        At most, if all that are known are larger or smaller: then as long as the smallest one, or for each FLOP as long
        as the largest one.
        """
        known = self._known()
        if not known:
            return None
        if flops <= known[0][0]:
            return known[0][1]
        for (less, quick), (more, slow) in pairwise(known):
            if flops <= more:
                return quick + (slow - quick) * (flops - less) / (more - less)
        return known[-1][1] * flops / known[-1][0]

    def tells(self, flops: float) -> bool:
        """Whether what is known says something about such a pass.

        Those that are all much larger or smaller do not: how much of their time was overhead, nobody knows.
        """
        known = self._known()
        return bool(known) and known[0][0] / _OCTAVE < flops < known[-1][0] * _OCTAVE

    def _known(self) -> list[tuple[float, float]]:
        """FLOPs and seconds, ascending."""
        seen = [(size, recent.value) for size, recent in list(self._sizes.values())]
        return sorted((size, size * value) for size, value in seen if value is not None)


class Controller:
    """Predicts how long prefills take, decides what is reused, and learns from what was done. Thread-safe.

    Args:
        cost: What the model computes.
        reuse_when: ``"faster"``, or ``"possible"``: then nothing is declined.

    Raises:
        ValueError: It is neither.
    """

    def __init__(self, cost: ModelCost, reuse_when: ReuseWhen = "faster") -> None:
        if reuse_when not in get_args(ReuseWhen):
            raise ValueError(f"reuse_when must be 'faster' or 'possible', not {reuse_when!r}")
        self.cost = cost
        self.declines = reuse_when == "faster"
        self._full = PassTimes()
        self._blend = PassTimes(_ENOUGH, _MEMORY_S)
        self._fetched: dict[str, Recent] = {}  # seconds per token, by place

    def learn_full(self, tokens: int, seconds: float) -> None:
        """Take in a full prefill: so many tokens in so many seconds."""
        if tokens >= _FEWEST_TOKENS:
            self._full.learn(self.cost.prefill(tokens), seconds)

    def learn_blend(self, flops: float, seconds: float, fetches: Iterable[tuple[str, int, float]]) -> None:
        """Take in a blend.

        Args:
            flops: What was computed.
            seconds: Of computing; the waiting for rows is not among them.
            fetches: From which place came the rows of how many tokens, in how many seconds.
        """
        self._blend.learn(flops, seconds)
        for place, tokens, fetched_s in fetches:
            self._fetched.setdefault(place, Recent(_ENOUGH, _MEMORY_S)).see(fetched_s / tokens)

    def best(self, plan: BlendPlan, places: Mapping[str, str], work_of: Work) -> BlendPlan:
        """The plan, or as much of it as is expected to save time.

        Args:
            plan: All that could be reused.
            places: Where its chunks come from, by their keys.
            work_of: FLOPs of a plan, the choice of tokens included.
        """
        if not (self.declines and plan.reuses):
            return plan
        whole, all_work = self._full_s(plan.num_tokens), self.cost.prefill(plan.num_tokens)
        if whole is None:
            return plan
        best, least = BlendPlan(plan.num_tokens, ()), _WORTH * whole
        for candidate in self._candidates(plan, places):
            work = work_of(candidate)
            if work > _MOST_WORK * all_work:
                continue
            computing = self._blend.seconds(work)
            if computing is None or not self._blend.tells(work):
                return candidate  # tried out, so that it is known
            seconds = self._together(computing, self._fetch_s(candidate, places))
            if seconds < least:
                best, least = candidate, seconds
        return best

    def spare_rows(self, plan: BlendPlan, places: Mapping[str, str], work_of: Work) -> int:
        """How many more tokens can be computed before the fetch is over: their recompute costs no time."""
        fetching = self._fetch_s(plan, places)
        if not fetching:
            return 0
        flops = work_of(plan)
        computing = self._blend.seconds(flops)
        if computing is None or computing >= fetching:
            return 0
        per_row = self.cost.flops_per_row + plan.num_tokens / 2 * self.cost.flops_per_pair
        return int((fetching - computing) / computing * flops / per_row)

    def wait_for(self, tokens: int) -> float:
        """Longest wait, in seconds, for a store that saves the prefill of so many tokens: half of that prefill."""
        worth = self._full_s(tokens)
        if worth is None:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, _WAIT_SHARE * worth))

    def _full_s(self, tokens: int) -> float | None:
        return self._full.seconds(self.cost.prefill(max(tokens, _FEWEST_TOKENS)))

    def _candidates(self, plan: BlendPlan, places: Mapping[str, str]) -> Iterator[BlendPlan]:
        """The plan; without the slowest place, the two slowest, …; what is exact; an earlier prompt alone."""
        yield plan
        slowest_first = sorted({places[key] for key in plan.keys}, key=self._seconds_per_token, reverse=True)
        for last in range(1, len(slowest_first)):
            left = set(slowest_first[last:])
            yield replace(plan, segments=tuple(s for s in plan.segments if places[s.key] in left))
        exact = tuple(s for s in plan.segments if s.exact)
        if exact and len(exact) < len(plan.segments):
            yield replace(plan, segments=exact)
        if plan.kept and plan.segments:
            yield replace(plan, segments=())

    def _fetch_s(self, plan: BlendPlan, places: Mapping[str, str]) -> float:
        return sum(len(s) * self._seconds_per_token(places[s.key]) for s in plan.segments)

    def _seconds_per_token(self, place: str) -> float:
        """0 while nothing is known, so that it is tried."""
        recent = self._fetched.get(place)
        return (recent.value if recent else None) or 0.0

    def _together(self, computing_s: float, fetching_s: float) -> float:
        return max(computing_s, fetching_s) + fetching_s / self.cost.num_layers
