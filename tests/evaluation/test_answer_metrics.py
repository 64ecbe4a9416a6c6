"""Metrics against examples worked by hand."""

from __future__ import annotations

import pytest

from rag_blend.evaluation import metrics


def test_normalisation_is_that_of_squad() -> None:
    assert metrics.normalise('  The  Beatles\' "a day" in-the life, an EP. ') == "beatles day inthe life ep"


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Stanley Hall", ["Stanley Hall"], 1.0),
        ("the Stanley hall.", ["Stanley Hall"], 1.0),
        ("It was Stanley Hall", ["G. Stanley Hall"], 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ("Hall", ["G. Stanley Hall", "Stanley Hall"], 2 / 3),
        ("Paris", ["London"], 0.0),
        ("", ["London"], 0.0),
        ("ab ab", ["ab"], 2 / 3),  # a word counts as often as it is wanted
        ("the", ["a"], 1.0),  # nothing is left of either
    ],
)
def test_f1(prediction: str, answers: list[str], expected: float) -> None:
    assert metrics.f1(prediction, answers) == pytest.approx(expected)


def test_exact_match() -> None:
    assert metrics.exact_match("The Hall!", ["no", "hall"])
    assert not metrics.exact_match("in the hall", ["hall"])


@pytest.mark.parametrize("metric", [metrics.f1, metrics.exact_match])
def test_there_must_be_answers(metric: object) -> None:
    with pytest.raises(ValueError, match="no answers"):
        metric("text", [])  # type: ignore[operator]


@pytest.mark.parametrize(
    "text",
    [
        "not mentioned",
        '"Not mentioned."',
        "The year is not provided in the context.",
        "It doesn't mention his birthplace.",
        "It doesn\N{RIGHT SINGLE QUOTATION MARK}t say",
        "This can't be determined.",
        "It can not be answered from the context.",
        "Unknown.",
        "N/A",
        " \n",
    ],
)
def test_abstentions(text: str) -> None:
    assert metrics.abstains(text)


@pytest.mark.parametrize(
    "text", ["Unknown Pleasures", "None of them", "Paris", "It is noted that he did not travel", "a knot", "Nashville"]
)
def test_answers_are_no_abstentions(text: str) -> None:
    assert not metrics.abstains(text)


@pytest.mark.parametrize(
    ("prediction", "wanted", "expected"),
    [
        ("one two three four", "one two three four", 1.0),
        ("one two three four and more", "one two three four", 1.0),
        ("one two 3 four", "one two three four", 0.5),
        ('"one two three', "one two three four", 0.75),
        ("two three four", "one two three four", 0.0),
        ("", "one", 0.0),
    ],
)
def test_verbatim_accuracy(prediction: str, wanted: str, expected: float) -> None:
    assert metrics.verbatim_accuracy(prediction, wanted) == expected


def test_verbatim_accuracy_needs_words() -> None:
    with pytest.raises(ValueError, match="nothing is wanted"):
        metrics.verbatim_accuracy("text", " ")
