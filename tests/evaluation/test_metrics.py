"""Metrics against examples worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

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


def test_kl_by_hand() -> None:
    full = torch.tensor([[math.log(0.5), math.log(0.5)], [math.log(0.9), math.log(0.1)]])
    other = torch.tensor([[math.log(0.25), math.log(0.75)], [math.log(0.9), math.log(0.1)]]) + 7.0  # logits may shift
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert metrics.kl(full, other).tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert metrics.kl(full, other)[0] != pytest.approx(float(metrics.kl(other, full)[0]), abs=1e-3)  # not symmetric


def test_kl_is_computed_in_float64_and_survives_what_is_ruled_out() -> None:
    full = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert metrics.kl(full, full).dtype == torch.float64
    assert metrics.kl(full, full).tolist() == [0.0]
    assert metrics.kl(full, torch.tensor([[0.0, 1.0, 2.0]]))[0] > 0.5
    assert metrics.kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]]))[0] == torch.inf
    tiny = torch.tensor([[0.0, 1e-4]])
    assert 0 < float(metrics.kl(torch.zeros(1, 2), tiny)[0]) == pytest.approx(1e-8 / 8, rel=1e-3)  # x^2/8


def test_agreement() -> None:
    full = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 1.0]])
    other = torch.tensor([[0.0, 9.0], [0.0, 1.0], [0.0, 1.0], [5.0, 4.0]])
    assert metrics.agreement(full, other) == 0.75


@pytest.mark.parametrize("metric", [metrics.kl, metrics.agreement])
def test_shapes_must_agree(metric: object) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        metric(torch.zeros(2, 3), torch.zeros(1, 3))  # type: ignore[operator]
