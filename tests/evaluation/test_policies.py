"""Policies as text."""

from __future__ import annotations

import pytest

from rag_blend.evaluation import Policy
from rag_blend.selectors.heads import HeadsSelector


@pytest.mark.parametrize(
    ("text", "prime", "selector", "ratio"),
    [
        ("none/hkvd:0.15", "none", "hkvd", 0.15),
        ("sample/anchor:0.08", "sample", "anchor", 0.08),
        (" sample/heads ", "sample", "heads", None),
        ("published", "none", "hkvd", 0.15),
        ("reuse", "none", "none", None),
        ("default", None, None, None),
    ],
)
def test_what_can_be_said(text: str, prime: str | None, selector: str | None, ratio: float | None) -> None:
    assert Policy.parse(text) == Policy(text.strip(), prime, selector, ratio)


def test_default_gives_the_engine_no_argument() -> None:
    policy = Policy.parse("default")
    assert policy.engine_arguments == {}
    assert policy.call_arguments == {"selector": None, "recompute_ratio": None}


def test_options_go_to_the_engine() -> None:
    policy = Policy.parse("sample/heads,prime_tokens=256,any_head=True,namespace=other")
    assert policy.engine_arguments == {
        "prime": "sample", "prime_tokens": 256, "any_head": True, "namespace": "other",
    }  # fmt: skip
    assert policy.call_arguments == {"selector": "heads", "recompute_ratio": None}


def test_one_engine_serves_policies_that_differ_in_selector_and_ratio_only() -> None:
    assert Policy.parse("published").group == Policy.parse("reuse").group
    assert Policy.parse("none/heads").group != Policy.parse("sample/heads").group
    assert Policy.parse("sample/heads").group != Policy.parse("sample/heads,prime_tokens=256").group
    assert Policy.parse("default").group != Policy.parse("sample/heads").group


def test_a_selector_object_is_described_with_what_it_was_made_of() -> None:
    few, many = (Policy("p", selector=HeadsSelector(n)).describe() for n in (2, 16))
    assert "HeadsSelector" in few["selector"] and few != many


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not of the form"),
        ("hkvd", "not of the form"),
        ("smaple/heads", "unknown prime 'smaple'; known: none, sample"),
        ("none/hkdv", "unknown selector 'hkdv'; known: .*hkvd"),
        ("none/hkvd:", "between 0 and 1"),
        ("none/hkvd:1.5", "between 0 and 1"),
        ("none/hkvd:nan", "between 0 and 1"),
        ("none/hkvd:15%", "between 0 and 1"),
        ("none/none:0.1", "'none' takes no ratio"),
        ("none/heads,prime_token=3", "unknown option 'prime_token=3'; known: .*prime_tokens="),
        ("none/heads,selector=all", "unknown option"),
        ("none/heads,prime_tokens", "unknown option"),
    ],
)
def test_nonsense_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Policy.parse(text)
