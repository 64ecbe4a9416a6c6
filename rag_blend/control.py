"""Is it worth blending this prompt, and how much recompute hides behind the fetch? A cost model learnt while running.

A blend takes as long as the longer of computing and fetching, and one layer more (CacheBlend, arXiv 2405.16444,
section 5: the loading controller); it is declined where full prefill would be about as fast, for that is exact. How
long a pass over the model takes is read off earlier passes of about the same work; a fetch, off recent ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

from rag_blend.plan import BlendPlan, Segment
from rag_blend.times import FetchTimes, PassTimes

Work = Callable[[BlendPlan], float]
ReuseWhen = Literal["faster", "possible"]

LONGEST_WAIT_S = 1.0  # for one call to a store
_SHORTEST_WAIT_S = 0.05  # or a first connection would never come about
_WAIT_SHARE = 0.5  # of the time that computing the rows again would take
_WORTH = 0.9  # of the time of a full prefill: a blend that saves less is not worth its approximation
_MOST_WORK = 0.8  # of a full prefill: rows with gaps between them take longer than as many in one piece
_ENOUGH = 2  # blends that tell whether those of their size are slow; the first of anything often is
_FIRST_DELAY = 4  # refusals
_TRIED_SHARE = 0.01  # of all time may go into trying what was slow
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


class Backoff:
    """When to try again what was found slow: after a number of refusals that doubles with each try.

    It doubles up to a hundred times the cost of a try. So in the long run tries take a hundredth of the time, and are a
    hundredth of the answers at most, however slow they are; and what is fast again is found after so many refusals.
    """

    def __init__(self) -> None:
        self._delay, self._refusals = _FIRST_DELAY, 0

    def reset(self) -> None:
        """It proved fast: the next refusal is a try."""
        self._delay = 0

    def refuse(self, cost: float) -> bool:
        """Count a refusal.

        Args:
            cost: How many times as long it would take as what is done instead.

        Returns:
            Whether it shall be tried instead.
        """
        self._refusals += 1
        if self._refusals <= self._delay:
            return False
        self._refusals, self._delay = 0, int(min(max(_FIRST_DELAY, 2 * self._delay), cost / _TRIED_SHARE))
        return True


class _Forecast(NamedTuple):
    """What is expected of a plan: FLOPs, seconds of computing, of fetching by place, and of both together."""

    plan: BlendPlan
    work: float
    computing_s: float
    fetching_s: Mapping[str, float]
    seconds: float


class Controller:
    """Predicts how long prefills take, decides what is reused, and learns from what was done.

    Not thread-safe: the engine serialises.

    Args:
        cost: What the model computes.
        reuse_when: ``"faster"``, or ``"possible"``: then nothing is declined.
        parallel_reads: How many entries are read at once.

    Raises:
        ValueError: `reuse_when` is neither.
    """

    def __init__(self, cost: ModelCost, reuse_when: ReuseWhen = "faster", parallel_reads: int = 1) -> None:
        if reuse_when not in get_args(ReuseWhen):
            raise ValueError(f"reuse_when must be 'faster' or 'possible', not {reuse_when!r}")
        self.cost = cost
        self.declines = reuse_when == "faster"
        self._full = PassTimes()
        self._blend = PassTimes(_ENOUGH)
        self._fetched = defaultdict[str, FetchTimes](partial(FetchTimes, parallel_reads))  # by place
        self._backoffs = defaultdict[str | None, Backoff](Backoff)  # by the place that is slow; None: computing is
        self._trial: tuple[Backoff, float] | None = None  # and in how many seconds it proves fast

    def learn_full(self, tokens: int, seconds: float) -> None:
        """Take in a full prefill: so many tokens in so many seconds."""
        if tokens >= _FEWEST_TOKENS:
            self._full.learn(self.cost.prefill(tokens), seconds)

    def learn_blend(self, flops: float, seconds: float, fetches: Iterable[tuple[str, int, int, float]]) -> None:
        """Take in a blend.

        Args:
            flops: What was computed.
            seconds: Of computing; the waiting for rows is not among them.
            fetches: From which place came how many entries, the rows of how many tokens, in how many seconds.
        """
        self._blend.learn(flops, seconds)
        fetching_s = 0.0
        for place, entries, tokens, fetched_s in fetches:
            self._fetched[place].learn(entries, tokens, fetched_s)
            fetching_s += fetched_s
        trial, self._trial = self._trial, None
        if trial and self._together(seconds, fetching_s) < trial[1]:
            trial[0].reset()

    def best(self, plan: BlendPlan, places: Mapping[str, str], work_of: Work) -> BlendPlan:
        """The plan, or as much of it as is expected to save time; now and then one that is not, to see whether it does.

        Args:
            plan: All that could be reused.
            places: Where its chunks come from, by their keys.
            work_of: FLOPs of a plan, the choice of tokens included.
        """
        self._trial = None
        if not (self.declines and plan.reuses):
            return plan
        whole, most_work = self._full_s(plan.num_tokens), _MOST_WORK * self.cost.prefill(plan.num_tokens)
        if whole is None:
            return plan
        forecasts = [self._forecast(candidate, whole, places, work_of) for candidate in self._candidates(plan, places)]
        best, least = BlendPlan(plan.num_tokens, ()), _WORTH * whole
        for forecast in forecasts:
            if forecast.work <= most_work and forecast.seconds < least:
                best, least = forecast.plan, forecast.seconds
                if not self._blend.tells(forecast.work):
                    return best  # tried out, so that it is known
        refused = best is not plan and forecasts[0].work <= most_work
        return plan if refused and self._tries(forecasts[0], least) else best

    def spare_rows(self, plan: BlendPlan, places: Mapping[str, str], work_of: Work) -> int:
        """How many more tokens can be computed before the fetch is over: their recompute costs no time.

        None in a trial: the fetch may be over sooner than expected.
        """
        fetching = sum(self._fetching_s(plan, places).values())
        if self._trial or not fetching:
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
        fetching_s, needs = self._fetching_s(plan, places), _needs(plan, places)
        slowest_first = sorted(needs, key=lambda place: fetching_s[place] / needs[place].tokens, reverse=True)
        for last in range(1, len(slowest_first)):
            left = set(slowest_first[last:])
            yield replace(plan, segments=tuple(s for s in plan.segments if places[s.key] in left))
        exact = tuple(s for s in plan.segments if s.exact)
        if exact and len(exact) < len(plan.segments):
            yield replace(plan, segments=exact)
        if plan.kept and plan.segments:
            yield replace(plan, segments=())

    def _forecast(self, plan: BlendPlan, whole: float, places: Mapping[str, str], work_of: Work) -> _Forecast:
        """Of what nobody knows, that it is computed as fast as a full prefill, so that it is tried if that is best."""
        work, fetching_s = work_of(plan), self._fetching_s(plan, places)
        known = self._blend.seconds(work) if self._blend.tells(work) else None
        computing_s = whole * work / self.cost.prefill(plan.num_tokens) if known is None else known
        return _Forecast(plan, work, computing_s, fetching_s, self._together(computing_s, sum(fetching_s.values())))

    def _fetching_s(self, plan: BlendPlan, places: Mapping[str, str]) -> Mapping[str, float]:
        return {place: self._fetched[place].seconds(*needed) for place, needed in _needs(plan, places).items()}

    def _tries(self, refused: _Forecast, instead_s: float) -> bool:
        """Whether a plan is tried although something else takes less time; what makes it slow is blamed."""
        slow_place = max(refused.fetching_s, key=lambda place: refused.fetching_s[place], default=None)
        backoff = self._backoffs[slow_place if refused.computing_s < instead_s else None]
        if not backoff.refuse(refused.seconds / instead_s):
            return False
        self._trial = backoff, instead_s
        return True

    def _together(self, computing_s: float, fetching_s: float) -> float:
        return max(computing_s, fetching_s) + fetching_s / self.cost.num_layers


class _Needed(NamedTuple):
    entries: int
    tokens: int


def _needs(plan: BlendPlan, places: Mapping[str, str]) -> Mapping[str, _Needed]:
    """What a plan takes from each place."""
    segments = defaultdict[str, list[Segment]](list)
    for segment in plan.segments:
        segments[places[segment.key]].append(segment)
    return {place: _Needed(len({s.key for s in found}), sum(map(len, found))) for place, found in segments.items()}
