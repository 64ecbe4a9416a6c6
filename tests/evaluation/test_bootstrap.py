"""Intervals: where they must be exact, and how often they hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rag_blend.evaluation.bootstrap import difference_interval, mean_interval, ratio_interval


def test_values_that_do_not_vary_leave_no_doubt() -> None:
    assert mean_interval([2.0] * 5) == (2.0, 2.0, 2.0)
    assert difference_interval([3.0, 4.0, 9.0], [1.0, 2.0, 7.0]) == pytest.approx((2.0, 2.0, 2.0))  # because paired
    assert ratio_interval([1.0, 2.0, 9.0], [2.0, 4.0, 18.0]) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_holds_the_estimate_and_repeats() -> None:
    values = np.random.default_rng(1).exponential(size=30).tolist()
    interval = mean_interval(values)
    assert interval.estimate == pytest.approx(np.mean(values))
    assert interval.low < interval.estimate < interval.high
    assert interval == mean_interval(values) != mean_interval(values, seed=1)


def test_it_is_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(2).normal(size=400)
    interval = mean_interval(values.tolist())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(400), rel=0.1)


def test_it_covers_the_truth_about_as_often_as_promised() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        shared = rng.normal(size=40)
        left, right = 1.0 + shared + rng.normal(size=40), shared + rng.normal(size=40)
        low, high = difference_interval(left.tolist(), right.tolist())[1:]
        covered += low <= 1.0 <= high
    assert 0.88 < covered / 200 < 0.99


def test_pairing_narrows_a_difference() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(scale=10.0, size=50)
    left, right = (shared + rng.normal(size=50)).tolist(), shared.tolist()
    paired = difference_interval(left, right)
    unpaired = difference_interval(left, rng.permutation(right).tolist())
    assert paired.high - paired.low < 0.3 * (unpaired.high - unpaired.low)


def test_a_ratio_to_nothing_is_undefined() -> None:
    assert all(math.isnan(bound) for bound in ratio_interval([1.0, 2.0], [0.0, 0.0]))
    some = ratio_interval([1.0, 1.0], [0.0, 1.0])  # a quarter of the resamples cannot be used
    assert some.estimate == 2.0 and all(math.isfinite(bound) for bound in some)


def test_there_must_be_values_in_pairs() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        difference_interval([1.0, 2.0], [1.0])
