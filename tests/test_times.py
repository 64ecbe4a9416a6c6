"""What passes and fetches are expected to take, by what the last ones took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_blend.times import FetchTimes, PassTimes


class TestPassTimes:
    def test_what_was_seen_is_told_and_what_lies_between_is_interpolated(self) -> None:
        times = PassTimes()
        assert times.seconds(2**33) is None
        times.learn(2**33, 0.2)
        times.learn(2**35, 0.5)
        assert times.seconds(2**33) == pytest.approx(0.2)
        assert times.seconds(2.5 * 2**33) == pytest.approx(0.35)

    def test_what_is_known_tells_as_far_beyond_as_it_spans(self) -> None:
        times = PassTimes()
        assert not times.tells(2**33)
        times.learn(2**33, 0.2)
        told = [times.tells(share * 2**33) for share in (0.4, 0.6, 1.9, 2.1)]
        assert told == [False, True, True, False]  # how much was overhead, nobody knows
        times.learn(2**35, 0.5)
        assert [times.tells(share * 2**33) for share in (0.2, 0.3, 15, 17)] == told

    def test_below_what_was_seen_the_line_goes_on(self) -> None:
        times = PassTimes()
        times.learn(2**33, 0.2)
        times.learn(2**35, 0.5)
        assert times.seconds(0.9 * 2**33) == pytest.approx(0.19)
        assert times.seconds(0.5 * 2**33) == pytest.approx(0.15)

    def test_above_what_was_seen_each_flop_takes_as_long(self) -> None:
        """Also where short passes took the same time, whatever they did: long ones will not."""
        times = PassTimes()
        times.learn(2**33, 0.5)
        times.learn(2**35, 0.5)
        assert times.seconds(2**36) == pytest.approx(1.0)

    @pytest.mark.parametrize(("small", "large"), [(1.0, 0.9), (0.1, 9.0)])
    def test_noise_does_not_bend_it_too_far(self, small: float, large: float) -> None:
        """A smaller pass takes no longer than a larger one, and no less for each FLOP."""
        times = PassTimes()
        times.learn(2**33, small)
        times.learn(2**34, large)
        assert 0.5 * small <= (times.seconds(2**32) or 0.0) <= small

    def test_of_a_single_one_each_flop_takes_as_long(self) -> None:
        times = PassTimes()
        times.learn(2**33, 0.2)
        assert [times.seconds(2.0**size) for size in (32, 33, 35)] == pytest.approx([0.1, 0.2, 0.8])

    @given(st.lists(st.floats(2**30, 2**38), max_size=60), st.floats(0, 1), st.floats(2**30, 2**38))
    def test_passes_of_different_work_in_one_octave_do_not_blur(
        self, works: list[float], overhead_s: float, asked: float
    ) -> None:
        """Each counts with its own FLOPs: where time grows in a line with them, all of that line is told exactly."""
        times = PassTimes()
        for flops in (2**29, *works, 2**39):
            times.learn(flops, overhead_s + flops / 1e11)
        assert times.seconds(asked) == pytest.approx(overhead_s + asked / 1e11)

    def test_a_hiccup_says_nothing(self) -> None:
        times = PassTimes()
        for seconds in (0.2, 9.0, 0.21, 0.22):
            times.learn(2**33, seconds)
        assert times.seconds(2**33) == pytest.approx(0.21)

    def test_it_follows_a_machine_that_slows_down(self) -> None:
        times = PassTimes()
        for seconds in (0.2, 0.2, 0.2, 0.6, 0.6, 0.6):
            times.learn(2**33, seconds)
        assert times.seconds(2**33) == pytest.approx(0.6)

    def test_untimed_and_empty_passes_teach_nothing(self) -> None:
        times = PassTimes()
        times.learn(1e10, 0.0)
        times.learn(0.0, 1.0)
        assert times.seconds(1e10) is None

    def test_the_first_of_anything_may_be_slow(self) -> None:
        times = PassTimes(at_least=2)
        times.learn(2**33, 3.0)
        assert times.seconds(2**33) is None
        times.learn(2**33, 0.2)
        assert times.seconds(2**33) == pytest.approx(0.2)


class TestFetchTimes:
    def test_nobody_knows_from_a_single_fetch(self) -> None:
        times = FetchTimes()
        assert times.seconds(1, 100) == 0.0
        times.learn(1, 100, 3.0)
        assert times.seconds(1, 100) == 0.0
        times.learn(1, 100, 0.2)
        assert times.seconds(1, 100) == pytest.approx(0.2)

    @pytest.mark.parametrize("at_once", [1, 2, 8])
    @given(
        latency_s=st.floats(0, 1),
        token_s=st.floats(1e-7, 1e-3),
        entries=st.integers(1, 40),
        size=st.integers(64, 2048),
    )
    def test_each_round_of_reads_has_its_latency(
        self, at_once: int, latency_s: float, token_s: float, entries: int, size: int
    ) -> None:
        times = FetchTimes(at_once)
        for seen, tokens in 2 * [(1, 32), (1, 600), (16, 100_000), (5, 2500)]:
            times.learn(seen, tokens, -(-seen // at_once) * latency_s + tokens * token_s)
        tokens, rounds = min(entries, at_once) * size, -(-entries // at_once)
        expected = rounds * latency_s + rounds * tokens * token_s
        assert times.seconds(entries, rounds * tokens) == pytest.approx(expected)

    def test_short_fetches_are_not_forgotten_over_long_ones(self) -> None:
        times = FetchTimes()
        for tokens in (100, 100, *50 * [8000]):
            times.learn(1, tokens, 0.5 + tokens * 1e-5)
        assert times.seconds(1, 100) == pytest.approx(0.501)

    def test_fetches_of_one_size_say_nothing_about_latency(self) -> None:
        times = FetchTimes()
        for _ in range(3):
            times.learn(1, 100, 0.2)
        assert times.seconds(1, 50) == pytest.approx(0.1)

    def test_a_hiccup_says_nothing(self) -> None:
        times = FetchTimes()
        for seconds in (9.0, 0.2, 0.2, 9.0, 0.2):
            times.learn(1, 1000, seconds)
        assert times.seconds(1, 1000) == pytest.approx(0.2)
