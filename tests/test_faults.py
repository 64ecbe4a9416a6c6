"""Whatever breaks under an engine, it answers, in time, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import ALL, Fault, observe, place_of


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_fault_costs_time_and_nothing_else(fault: Fault, tmp_path: Path) -> None:
    with place_of(fault, tmp_path) as (where, storage):
        outcome = observe(fault, where, storage)
    assert outcome.same_answer
    assert outcome.seconds < fault.within_s
    assert outcome.counted == 0 if fault.counter is None else outcome.counted > 0
    assert outcome.reused_tokens > 0
