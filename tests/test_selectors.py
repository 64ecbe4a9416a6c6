from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_model, random_text

from rag_blend import BlendEngine
from rag_blend.plan import BlendPlan, Segment
from rag_blend.runner import BlendPolicy
from rag_blend.selectors.anchor import AnchorSelector
from rag_blend.selectors.base import AttentionSelector, Scores
from rag_blend.selectors.hkvd import HkvdSelector
from rag_blend.selectors.probe import ProbeSelector
from rag_blend.selectors.spread import SpreadSelector

MakeEngine = Callable[..., BlendEngine]
PLAN = BlendPlan(60, (Segment(0, 10, "head", 0, True), Segment(12, 32, "a", 0, False), Segment(34, 54, "b", 0, False)))
ATTENTION: tuple[type[AttentionSelector], ...] = (AnchorSelector, ProbeSelector)


def scores(**at: float) -> Scores:
    values = np.full(60, 0.1, dtype=np.float32)
    for name, value in at.items():
        values[int(name[1:])] = value
    return values


@pytest.mark.parametrize("selector", ATTENTION)
def test_what_the_question_reads_is_recomputed(selector: type[AttentionSelector]) -> None:
    received = scores(p5=9.0, p13=3.0, p40=5.0, p58=9.0)  # 5 is exact, 58 is fresh: neither is to be chosen
    assert selector().select_by_attention(PLAN, 0.05, received, scores()).tolist() == [13, 40]
    assert selector().select_by_attention(PLAN, 0.0, received, scores()).tolist() == []
    everything = selector().select_by_attention(PLAN, 1.0, received, scores())
    assert everything.tolist() == PLAN.reusable.tolist()


@pytest.mark.parametrize("selector", ATTENTION)
@pytest.mark.parametrize(
    ("reusable", "question", "chosen"),
    [
        (10_000, 100, 300 - 24),
        (2000, 100, 135 - 24),
        (2000, 20, 135 - 15),
        (800, 100, 76 - 24),
        (300, 100, 6),
        (40, 100, 1),
    ],
)
def test_by_default_the_look_ahead_is_part_of_the_work(
    selector: type[AttentionSelector], reusable: int, question: int, chosen: int
) -> None:
    plan = BlendPlan(reusable + question, (Segment(0, reusable, "a", 0, False),))
    equal = np.ones(reusable + question, dtype=np.float32)
    assert len(selector().select_by_attention(plan, None, equal, equal)) == chosen


def test_spread_takes_the_first_tokens_and_others_at_equal_distances() -> None:
    assert SpreadSelector().select(PLAN, None).tolist() == [
        *(12, 13, 14, 15, 18, 22, 26, 30),
        *(34, 35, 36, 37, 40, 44, 48, 52),
    ]
    assert SpreadSelector(2).select(PLAN, None).tolist() == [12, 13, 34, 35]
    assert SpreadSelector().select(BlendPlan(60, ()), None).tolist() == []


@pytest.mark.parametrize("length", [1, 3, 5, 20])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_spread_takes_as_many_as_the_ratio_says(length: int, ratio: float) -> None:
    plan = BlendPlan(60, (Segment(7, 7 + length, "a", 0, False),))
    chosen = SpreadSelector().select(plan, ratio)
    assert len(chosen) == math.ceil(length * ratio)
    assert np.isin(chosen, plan.reusable).all() and (np.diff(chosen) > 0).all()


def test_anchor_weighs_attention_with_the_root_of_staleness() -> None:
    received, staleness = scores(p13=3.0, p14=2.0, p40=1.9), scores(p13=0.1, p14=0.4, p40=1.6)
    # 3 * sqrt(.1) = .95, 2 * sqrt(.4) = 1.26, 1.9 * sqrt(1.6) = 2.4
    ranked = [AnchorSelector().select_by_attention(PLAN, k / 40, received, staleness).tolist() for k in (1, 2, 3)]
    assert ranked == [[40], [14, 40], [13, 14, 40]]
    assert ProbeSelector().select_by_attention(PLAN, 1 / 40, received, staleness).tolist() == [13]


class Watching(ProbeSelector):
    """Keeps what it was given."""

    def select_by_attention(self, plan: BlendPlan, ratio: float | None, received: Scores, staleness: Scores) -> Any:
        self.plan, self.received, self.staleness = plan, received, staleness
        return super().select_by_attention(plan, ratio, received, staleness)


def watched(make_engine: MakeEngine, texts: list[str], **options: Any) -> tuple[Watching, BlendEngine]:
    engine = make_engine(**options)
    engine.ingest(texts, progress=False)
    selector = Watching()
    engine.prefill("\n\n".join([*texts, "and where is the old lamp? " * 12]), selector=selector)
    return selector, engine


def test_staleness_comes_from_the_store(make_engine: MakeEngine, texts: list[str]) -> None:
    selector, _ = watched(make_engine, texts, prime=random_text(50, 30))
    known = selector.staleness[selector.plan.reusable]
    assert len(selector.plan.blended) == len(texts)
    assert (selector.staleness[selector.plan.fresh] == 1.0).all()
    assert known.min() >= 0.0 and known.max() < 1.0 and len(np.unique(known)) > len(known) // 2


def test_staleness_of_unprimed_chunks_is_unknown(make_engine: MakeEngine, texts: list[str]) -> None:
    selector, _ = watched(make_engine, texts)
    assert (selector.staleness == 1.0).all()


def test_a_cut_chunk_brings_the_staleness_of_its_part(make_engine: MakeEngine) -> None:
    text = random_text(1, 120)
    engine = make_engine(prime=random_text(50, 30))
    engine.ingest([text], progress=False)
    whole, cut = Watching(), Watching()
    engine.prefill(f"{text}\n\nwhat?", selector=whole)
    engine.prefill(f"so {text[200:]}\n\nwhat?", selector=cut)
    (segment,) = cut.plan.blended
    assert segment.offset > 0
    part = whole.staleness[whole.plan.blended[0].start + segment.offset :][: len(segment)]
    assert cut.staleness[segment.start : segment.end].tolist() == part.tolist()


def test_attention_is_that_of_the_end_of_the_question(make_engine: MakeEngine, texts: list[str]) -> None:
    """Checked against the weights that eager attention returns over the very same rows: all of them computed."""
    engine = make_engine()
    engine.ingest(texts[:1], progress=False)
    selector = Watching()
    prompt = f"{texts[0]}\n\nwhere is the old lamp?"
    engine.prefill(prompt, selector=selector)
    assert len(selector.plan.question) <= 32 and len(selector.plan.fresh) == len(selector.plan.question)
    model = engine._model
    ids = torch.tensor([engine.tokenizer(prompt)["input_ids"]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[1]  # the second half of two layers
    expected = weights[0, :, selector.plan.question].mean(dim=(0, 1)).numpy()
    np.testing.assert_allclose(selector.received, expected, atol=1e-5)  # one chunk in front: reuse is exact


@pytest.mark.parametrize(("num_layers", "run"), [(1, 1), (2, 2), (4, 3), (8, 6)])
def test_the_look_ahead_ends_after_three_quarters_of_the_layers(
    make_engine: MakeEngine, texts: list[str], num_layers: int, run: int
) -> None:
    selector, engine = watched(make_engine, texts, model=random_model(num_hidden_layers=num_layers))
    prompt = "\n\n".join([*texts, "and where is the old lamp? " * 12])
    stats = engine.prefill(prompt, selector="probe", recompute_ratio=0.0).stats
    reusable = stats.reused_tokens
    assert stats.recomputed_tokens == 0 and len(selector.plan.question) > 32
    assert stats.recompute_ratio == pytest.approx(32 * run / (num_layers * reusable))
    full = engine.prefill(prompt, recompute_ratio=1.0).logits
    torch.testing.assert_close(full, engine.prefill(prompt, reuse=False).logits, atol=1e-4, rtol=1e-4)


def test_damage_behind_the_end_of_the_look_ahead_costs_a_recompute(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    """The look ahead has used three of four layers when the last one proves damaged."""
    engine = make_engine(model=random_model(num_hidden_layers=4), storage=tmp_path, prime=random_text(50, 30))
    engine.ingest(texts, progress=False)
    prompt = "\n\n".join([*texts, "and where is the old lamp?"])
    hits = engine.prefill(prompt).stats.hits
    for file in tmp_path.glob("??/*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    answer = engine.prefill(prompt)
    assert answer.stats.misses == hits == engine.counts()["corrupt"] == len(texts)
    assert answer.stats.mode == "full"
    assert torch.equal(answer.logits, engine.prefill(prompt, reuse=False).logits)


def test_rows_that_nobody_computed_are_invisible_to_the_probe(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gaps between chunks are uninitialised memory: whatever it holds must not matter."""
    usual, _ = watched(make_engine, texts)
    assert len(usual.plan.fresh) > len(usual.plan.question) and len(usual.plan.question) > 32
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    again, _ = watched(make_engine, texts)
    assert np.array_equal(usual.received, again.received)
    absent = np.setdiff1d(usual.plan.fresh, usual.plan.question[-32:])
    assert len(absent) and (usual.received[absent] == 0.0).all()


class _DropsAndShifts(HkvdSelector):
    shifts_rest = True


def test_a_selector_that_drops_rows_late_cannot_shift_the_others() -> None:
    """A shift follows the tokens chosen before the first layer."""
    with pytest.raises(ValueError, match="_DropsAndShifts has shifts_rest and a check_layer"):
        BlendPolicy.of(_DropsAndShifts(), None)
