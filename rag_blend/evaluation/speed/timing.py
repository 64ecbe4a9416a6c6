"""Times of calls, taken from outside, and what many of them say."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rag_blend.evaluation.speed import gpu

T = TypeVar("T")
R = TypeVar("R", bound=Mapping[str, Any])  # columns by name

# A call that got less than this share of the cores that the best call of its kind got has lost some to others.
_LOST_BELOW = 0.85


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a call returned, and what it took.

    Attributes:
        value: What it returned.
        wall_s: Seconds that passed.
        cpu_s: Seconds of CPU time that all threads of this process used meanwhile.
    """

    value: T
    wall_s: float
    cpu_s: float


def timed(call: Callable[[], T]) -> Timed[T]:
    """Call, and take the time; a GPU's as well, which goes on working behind calls that have returned."""
    gpu.wait()
    cpu, wall = time.process_time(), time.perf_counter()
    value = call()
    gpu.wait()
    return Timed(value, time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(contestants: Sequence[T], turn: int) -> list[T]:
    """All of them, another one first in each turn: whatever drifts during a run meets each of them alike."""
    first = turn % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def summary(wall_s: Sequence[float], cpu_s: Sequence[float]) -> dict[str, Any]:
    """What runs of the same thing say, as columns of a result.

    Args:
        wall_s: Seconds of each run.
        cpu_s: CPU seconds of each.

    Returns:
        ``median_s``, ``min_s``, ``max_s``; ``median_cpu_s``; ``cpus``: the median of CPU by wall time; ``lost``: how
        many runs had to share cores with others, judged by the run that had most of them.
    """
    cpus = [cpu / wall for wall, cpu in zip(wall_s, cpu_s, strict=True)]
    return {
        "median_s": statistics.median(wall_s),
        "min_s": min(wall_s),
        "max_s": max(wall_s),
        "median_cpu_s": statistics.median(cpu_s),
        "cpus": statistics.median(cpus),
        "lost": sum(1 for one in cpus if one < _LOST_BELOW * max(cpus)),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def grouped(rows: Iterable[R], *names: str) -> Iterator[tuple[tuple[Any, ...], list[R]]]:
    """Samples or rows that agree in some columns, with the values there; in the order in which each first occurs."""
    groups: dict[tuple[Any, ...], list[R]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()
