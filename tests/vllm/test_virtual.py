"""Scattered rows as virtual requests. Needs no vLLM."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rag_blend.vllm.virtual import VirtualRequests


def test_runs_are_sequences_that_end_where_they_end() -> None:
    requests = VirtualRequests.of(np.array([3, 4, 5, 9, 20, 21]))
    assert requests.positions.tolist() == [9, 20, 21, 3, 4, 5]
    assert requests.query_starts.tolist() == [0, 1, 3, 6]
    assert requests.seq_lens.tolist() == [10, 22, 6]


@given(st.sets(st.integers(0, 80), min_size=1))
def test_bottom_right_causality_shows_each_row_its_past_and_nothing_else(rows: set[int]) -> None:
    requests = VirtualRequests.of(np.array(sorted(rows)))
    assert sorted(requests.positions.tolist()) == sorted(rows)
    for number, seq_len in enumerate(requests.seq_lens):
        start, end = requests.query_starts[number : number + 2]
        for query in range(start, end):
            last_key_seen = seq_len - (end - query)  # the kernels' rule
            assert last_key_seen == requests.positions[query]
