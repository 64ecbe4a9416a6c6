"""The estimate of how long a prefill takes, and how long a store is waited for."""

from __future__ import annotations

import pytest

from rag_blend.pace import LONGEST_WAIT_S, Pace


def test_nothing_is_known_at_first() -> None:
    pace = Pace()
    assert pace.seconds_for(1000) is None
    assert pace.wait_for(1000) == LONGEST_WAIT_S


def test_it_learns_and_follows() -> None:
    pace = Pace()
    pace.learn(1000, 2.0)
    assert pace.seconds_for(500) == pytest.approx(1.0)
    for _ in range(30):
        pace.learn(1000, 1.0)
    assert pace.seconds_for(500) == pytest.approx(0.5, rel=1e-3)


def test_small_and_timeless_prefills_teach_nothing() -> None:
    pace = Pace()
    pace.learn(10, 5.0)
    pace.learn(1000, 0.0)  # what an accelerator does, nobody has timed
    assert pace.seconds_for(100) is None


def test_a_store_is_waited_for_half_as_long_as_it_saves() -> None:
    pace = Pace()
    pace.learn(1000, 1.0)
    assert pace.wait_for(400) == pytest.approx(0.2)
    assert pace.wait_for(100_000) == LONGEST_WAIT_S
    assert 0.0 < pace.wait_for(1) < 0.1  # long enough for a connection
