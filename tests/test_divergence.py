"""Divergences against examples worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_blend.divergence import agreement, kl


def test_kl_by_hand() -> None:
    full = torch.tensor([[math.log(0.5), math.log(0.5)], [math.log(0.9), math.log(0.1)]])
    other = torch.tensor([[math.log(0.25), math.log(0.75)], [math.log(0.9), math.log(0.1)]]) + 7.0  # logits may shift
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(full, other).tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert kl(full, other)[0] != pytest.approx(float(kl(other, full)[0]), abs=1e-3)  # not symmetric


def test_kl_is_computed_in_float64_and_survives_what_is_ruled_out() -> None:
    full = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert kl(full, full).dtype == torch.float64
    assert kl(full, full).tolist() == [0.0]
    assert kl(full, torch.tensor([[0.0, 1.0, 2.0]]))[0] > 0.5
    assert kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]]))[0] == torch.inf
    tiny = torch.tensor([[0.0, 1e-4]])
    assert 0 < float(kl(torch.zeros(1, 2), tiny)[0]) == pytest.approx(1e-8 / 8, rel=1e-3)  # x^2/8


def test_agreement() -> None:
    full = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 1.0]])
    other = torch.tensor([[0.0, 9.0], [0.0, 1.0], [0.0, 1.0], [5.0, 4.0]])
    assert agreement(full, other) == 0.75


@pytest.mark.parametrize("metric", [kl, agreement])
def test_shapes_must_agree(metric: object) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        metric(torch.zeros(2, 3), torch.zeros(1, 3))  # type: ignore[operator]
