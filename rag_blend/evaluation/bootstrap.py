"""Paired bootstrap: what a mean, a difference or a ratio of means would be on other cases of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
_Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate and its 95 % percentile interval (Efron 1979); NaN where it is not defined."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean of values, one per case.

    Raises:
        ValueError: There are none.
    """
    (drawn,) = _resampled_means(seed, values)
    return _interval(float(np.mean(values)), drawn)


def difference_interval(left: Sequence[float], right: Sequence[float], seed: int = 0) -> Interval:
    """Mean of `left` less mean of `right`; both have one value per case, in the same order.

    Raises:
        ValueError: There are none, or the lengths differ.
    """
    lefts, rights = _resampled_means(seed, left, right)
    return _interval(float(np.mean(left) - np.mean(right)), lefts - rights)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Interval:
    """Mean of `numerator` by mean of `denominator`; both have one value per case, in the same order.

    NaN when the denominator's mean is 0; resamples in which it is are left out.

    Raises:
        ValueError: There are none, or the lengths differ.
    """
    above, below = _resampled_means(seed, numerator, denominator)
    mean = float(np.mean(denominator))
    if mean == 0.0:
        return Interval(np.nan, np.nan, np.nan)
    usable = below != 0.0
    return _interval(float(np.mean(numerator)) / mean, above[usable] / below[usable])


def _resampled_means(seed: int, *columns: Sequence[float]) -> list[_Floats]:
    """Means of each column over the same resampled cases, (`RESAMPLES`,) each."""
    count = len(columns[0])
    if not count or any(len(column) != count for column in columns):
        raise ValueError(f"need as many values on both sides, and at least one; got {[len(c) for c in columns]}")
    picks = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    return [np.asarray(column, dtype=np.float64)[picks].mean(axis=1) for column in columns]


def _interval(estimate: float, drawn: _Floats) -> Interval:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(estimate, float(low), float(high))
