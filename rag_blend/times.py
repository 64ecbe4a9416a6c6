"""How long passes over a model and fetches from a store take, read off the last ones. What is known does not expire."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from functools import partial
from itertools import pairwise
from typing import NamedTuple

_OCTAVE = 2.0  # so far apart sizes are told apart
_REMEMBERED = 5  # of an octave
_ENOUGH = 2  # fetches of an octave that tell whether a place is slow; the first one often is


class _Seen(NamedTuple):
    size: float
    seconds: float


class PassTimes:
    """How long passes took, by the work they did: of each octave the last few. Thread-safe.

    Args:
        at_least: How many passes of about the same work tell something.
    """

    def __init__(self, at_least: int = 1) -> None:
        self._at_least = at_least
        self._seen = defaultdict[int, deque[_Seen]](partial(deque, maxlen=_REMEMBERED))  # by log2 of FLOPs
        self._medians: dict[int, _Seen] = {}

    def learn(self, flops: float, seconds: float) -> None:
        """Take in one pass. One that nobody could time (0 s) teaches nothing."""
        if flops <= 0 or seconds <= 0:
            return
        octave = round(math.log2(flops))
        self._seen[octave].append(_Seen(flops, seconds))
        seen = list(self._seen[octave])
        if len(seen) >= self._at_least:
            # Larger ones take longer, so both medians go together; the lower ones, as hiccups only make things slower.
            self._medians[octave] = _Seen(*(statistics.median_low(values) for values in zip(*seen, strict=True)))

    def seconds(self, flops: float) -> float | None:
        """How long a pass takes: along the lines from each known size to the next. None while nothing is known.

        Smaller ones lie on the first line, but take no longer than the smallest known, and no less for each FLOP.
        Larger ones take as long for each FLOP as the largest, at most: on an accelerator the line may be flat, since
        short passes take as long as loading the weights.
        """
        known = sorted(self._medians.values())
        if not known:
            return None
        smallest, largest = known[0], known[-1]
        if flops >= largest.size:
            return largest.seconds * flops / largest.size
        for less, more in pairwise(known):
            if less.size <= flops <= more.size:
                return less.seconds + _slope(less, more) * (flops - less.size)
        slope = _slope(*known[:2]) if len(known) > 1 else math.inf
        return smallest.seconds - min(max(slope, 0.0), smallest.seconds / smallest.size) * (smallest.size - flops)

    def tells(self, flops: float) -> bool:
        """Whether what is known says something about such a pass: as far beyond it as what is known spans itself.

        A pass much larger or smaller than those of a single size may take any time: how much of theirs was overhead,
        nobody knows.
        """
        known = sorted(self._medians.values())
        if not known:
            return False
        smallest, largest = known[0].size, known[-1].size
        span = max(_OCTAVE, largest / smallest)
        return smallest / span < flops < largest * span


class FetchTimes:
    """How long fetches from one place took, by the tokens in a round of reads. Thread-safe.

    Every round has the place's latency, however much it brings.

    Args:
        at_once: How many entries are read at once; more of them take another round.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._rounds = PassTimes(_ENOUGH)

    def learn(self, entries: int, tokens: int, seconds: float) -> None:
        """Take in one fetch."""
        rounds = self._rounds_of(entries)
        self._rounds.learn(tokens / rounds, seconds / rounds)

    def seconds(self, entries: int, tokens: int) -> float:
        """How long a fetch takes; 0 while nobody knows, so that it is tried."""
        rounds = self._rounds_of(entries)
        return rounds * (self._rounds.seconds(tokens / rounds) or 0.0)

    def _rounds_of(self, entries: int) -> int:
        return math.ceil(entries / self._at_once)


def _slope(a: _Seen, b: _Seen) -> float:
    return (b.seconds - a.seconds) / (b.size - a.size)
