"""Derived and made-up cases."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rag_blend.evaluation import Case, Passage, copy_cases, lookup_cases, unanswerable

pytest_plugins = ["toy_collection"]


def test_unanswerable_loses_what_supports_the_answer(cases: list[Case]) -> None:
    case = unanswerable(cases[0])
    assert not case.answerable and case.answers == ()
    assert [passage.title for passage in case.passages] == ["Title 0", "Title 2", "Title 3", "Title 4"]
    assert (case.id, case.question, case.group) == (cases[0].id, cases[0].question, "toy/unanswerable")


def test_unanswerable_needs_marks_and_something_left(cases: list[Case]) -> None:
    unmarked = replace(cases[0], passages=(Passage("text"),))
    with pytest.raises(ValueError, match="marks no passage"):
        unanswerable(unmarked)
    with pytest.raises(ValueError, match="supporting passages only"):
        unanswerable(replace(cases[0], passages=(Passage("text", supporting=True),)))


class TestCopy:
    def test_the_answer_is_the_beginning_of_the_passage_named(self, passages: list[Passage]) -> None:
        long = [replace(p, text=f"{p.text} {p.text}") for p in passages]
        made = copy_cases(long, 5, seed=3, num_passages=3)
        assert len(made) == 5
        for case in made:
            (target,) = [passage for passage in case.passages if passage.supporting]
            assert len(case.passages) == 3
            wanted = " ".join(target.text.split()[:40])
            assert len(wanted.split()) == 40 and case.answers == (wanted, f"{target.title}\n{wanted}")
            assert f'titled "{target.title}"' in case.question
        assert {case.passages.index(next(p for p in case.passages if p.supporting)) for case in made} != {0}
        assert made == copy_cases(long, 5, seed=3, num_passages=3) != copy_cases(long, 5, seed=4, num_passages=3)

    def test_a_title_that_is_not_unique_names_nothing(self, passages: list[Passage]) -> None:
        same = [replace(passage, title="Same") for passage in passages]
        for case in copy_cases(same, 3):
            opening = " ".join(case.answers[0].split()[:6])
            assert f'begins with "{opening}"' in case.question
            assert sum(passage.text.startswith(opening) for passage in case.passages) == 1

    def test_short_passages_are_not_copied(self) -> None:
        with pytest.raises(ValueError, match="nothing to copy"):
            copy_cases([Passage("too short")], 1)


class TestLookup:
    def test_the_record_stands_in_one_passage(self) -> None:
        for case in lookup_cases(4, num_passages=5, seed=2):
            key = re.search(r"K-\d{4}", case.question)
            assert key is not None
            wanted = f"The access code of warehouse {key[0]} is {case.answers[0]}."
            assert [wanted in p.text for p in case.passages] == [p.supporting for p in case.passages]
            assert sum(p.supporting for p in case.passages) == 1 and len(case.passages) == 5

    def test_keys_are_distinct_and_nearly_the_same(self) -> None:
        (case,) = lookup_cases(1, num_passages=4)
        by_passage = [re.findall(r"K-(\d{4}) is (\d{5})", passage.text) for passage in case.passages]
        assert [len(records) for records in by_passage] == [8] * 4
        keys = [key for records in by_passage for key, _ in records]
        codes = [code for records in by_passage for _, code in records]
        assert len(set(keys)) == len(set(codes)) == 32
        near = [k for k in keys if any(sum(a != b for a, b in zip(k, o, strict=True)) == 1 for o in keys)]
        assert len(near) > 28

    def test_seeds(self) -> None:
        assert lookup_cases(2, seed=1) == lookup_cases(2, seed=1) != lookup_cases(2, seed=2)
