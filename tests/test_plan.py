from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_blend.match import Match
from rag_blend.plan import BlendPlan, Segment, plan_blend, positions_of


def match(key: str, start: int, length: int, offset: int = 0) -> Match:
    return Match(key, start, length, offset, offset + length)


def test_nothing_found_means_everything_fresh() -> None:
    plan = plan_blend(5, [], [])
    assert plan == BlendPlan(5, ())
    assert plan.fresh.tolist() == [0, 1, 2, 3, 4]
    assert plan.reusable.tolist() == []
    assert plan.exact_tokens == 0
    assert plan.keys == frozenset()


def test_head_chunk_and_question() -> None:
    plan = plan_blend(60, [match("head", 0, 10), match("first", 10, 20)], [match("second", 31, 20)])
    assert plan.segments == (
        Segment(0, 10, "head", 0, True),
        Segment(10, 30, "first", 0, True),
        Segment(31, 51, "second", 0, False),
    )
    assert plan.exact_tokens == 30
    assert plan.fresh.tolist() == [30, *range(51, 60)]
    assert plan.reusable.tolist() == list(range(31, 51))
    assert plan.blended == plan.segments[2:]
    assert plan.keys == {"head", "first", "second"}


def test_the_last_token_is_fresh_even_if_it_is_stored() -> None:
    assert plan_blend(30, [match("a", 0, 30)], []).segments == (Segment(0, 29, "a", 0, True),)
    assert plan_blend(30, [], [match("a", 10, 20)]).segments == (Segment(10, 29, "a", 0, False),)
    assert plan_blend(1, [match("a", 0, 1)], [match("a", 0, 1)], min_tokens=1).segments == ()
    assert plan_blend(0, [], []).segments == ()


def test_exact_comes_before_blended_and_earlier_before_later() -> None:
    plan = plan_blend(100, [match("exact", 0, 40)], [match("x", 30, 40), match("y", 50, 40)])
    assert plan.segments == (
        Segment(0, 40, "exact", 0, True),
        Segment(40, 70, "x", 10, False),
        Segment(70, 90, "y", 20, False),
    )


def test_a_chunk_around_another_gives_two_segments() -> None:
    plan = plan_blend(100, [], [match("in", 40, 20), match("out", 10, 80, offset=5)])
    assert plan.segments == (
        Segment(10, 40, "out", 5, False),
        Segment(40, 60, "in", 0, False),
        Segment(60, 90, "out", 55, False),
    )


def test_short_remainders_are_not_worth_it_unless_exact() -> None:
    assert plan_blend(100, [match("e", 0, 3)], [match("x", 3, 15)]).segments == (Segment(0, 3, "e", 0, True),)
    assert len(plan_blend(100, [], [match("x", 3, 16)]).segments) == 1
    assert plan_blend(17, [], [match("x", 1, 16)]).segments == ()  # 15 are left of it, because of the last token
    # What a dropped remainder would have covered is free for the next.
    plan = plan_blend(100, [], [match("x", 10, 30), match("y", 30, 20), match("z", 35, 30)])
    assert [(s.key, s.start, s.end) for s in plan.segments] == [("x", 10, 40), ("z", 40, 65)]


def test_matches_may_reach_beyond_the_prompt() -> None:
    assert plan_blend(30, [], [match("x", 5, 100)]).segments == (Segment(5, 29, "x", 0, False),)
    assert plan_blend(30, [], [match("x", 50, 100)]).segments == ()


def test_tokens_of_an_earlier_prompt_come_before_everything() -> None:
    plan = plan_blend(100, [match("head", 0, 10), match("first", 10, 20)], [match("x", 35, 40)], kept=25)
    assert plan.segments == (Segment(25, 30, "first", 15, True), Segment(35, 75, "x", 0, False))
    assert plan.exact_tokens == 30
    assert plan.fresh.tolist() == [*range(30, 35), *range(75, 100)]
    alone = plan_blend(30, [match("head", 0, 10)], [], kept=20)
    assert alone.segments == () and alone.reuses and not plan_blend(30, [], []).reuses
    assert alone.question.tolist() == alone.fresh.tolist() == list(range(20, 30))


def test_positions_of() -> None:
    segments = [Segment(5, 7, "a", 0, False), Segment(1, 3, "b", 0, True)]
    assert positions_of(segments).tolist() == [5, 6, 1, 2]
    assert positions_of([]).dtype == np.int64


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[Match], list[Match], int]:
    num_tokens = draw(st.integers(0, 120))
    found = st.builds(
        match, st.sampled_from("abcdef"), st.integers(0, max(0, num_tokens - 1)), st.integers(1, 60), st.integers(0, 40)
    )
    inside = found.map(lambda m: match(m.key, m.start, max(1, min(m.length, num_tokens - m.start)), m.offset))
    lists = st.lists(inside, max_size=7) if num_tokens else st.just([])
    return num_tokens, draw(lists), draw(lists), draw(st.integers(1, 20))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(prompts())
def test_every_plan_is_sound(prompt: tuple[int, list[Match], list[Match], int]) -> None:
    num_tokens, prefix, chunks, min_tokens = prompt
    plan = plan_blend(num_tokens, prefix, chunks, min_tokens)
    # Sorted, disjoint, inside, and never the last token.
    ends = [0, *(s.end for s in plan.segments)]
    assert all(end <= s.start < s.end <= num_tokens - 1 for end, s in zip(ends, plan.segments, strict=False))
    # Every position is fresh, exact or reusable, once.
    exact = positions_of(s for s in plan.segments if s.exact)
    assert len(exact) == plan.exact_tokens
    assert sorted([*plan.fresh, *exact, *plan.reusable]) == list(range(num_tokens))
    # Every segment is a part of a match of its kind, with the chunk's own token at each place.
    for segment in plan.segments:
        assert segment.exact or len(segment) >= min_tokens
        assert any(
            m.key == segment.key
            and m.start <= segment.start
            and segment.end <= m.end
            and segment.start - segment.offset == m.start - m.offset
            for m in (prefix if segment.exact else chunks)
        )
    # Nothing that is exact is given away, and no blended match is left out that still has room.
    covered_exactly = {p for m in prefix for p in range(m.start, min(m.end, num_tokens - 1))}
    assert set(exact.tolist()) == covered_exactly
    fresh = set(plan.fresh.tolist())
    for m in chunks:
        run = longest = 0
        for p in range(m.start, min(m.end, num_tokens - 1)):
            run = run + 1 if p in fresh else 0
            longest = max(longest, run)
        assert longest < min_tokens


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompts())
def test_a_plan_of_the_first_match_never_depends_on_the_others(
    prompt: tuple[int, list[Match], list[Match], int],
) -> None:
    num_tokens, prefix, _, min_tokens = prompt
    plan = plan_blend(num_tokens, prefix, [], min_tokens)
    for m in prefix[:1]:
        expected = set(range(m.start, min(m.end, num_tokens - 1)))
        assert expected <= {p for s in plan.segments if s.key == m.key for p in range(s.start, s.end)}
