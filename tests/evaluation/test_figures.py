"""The deviation figures: what they measure has known values where blending is exact, and what they draw is that."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_model, random_text
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rag_blend import BlendEngine
from rag_blend.evaluation.cases import Case, Passage
from rag_blend.evaluation.deviation import PromptDeviation, PromptSpans, spearman
from rag_blend.evaluation.figures import (
    RATIOS,
    SELECTORS,
    CacheDeviation,
    attention_lines,
    deviation_lines,
    draw_figures,
    measure,
    rank_lines,
    spans_of,
)
from rag_blend.evaluation.prompts import head_ids

MakeEngine = Callable[..., BlendEngine]
NUM_LAYERS = 4


def case_of(number: int, num_passages: int = 3) -> Case:
    passages = tuple(Passage(random_text(100 * number + i, 40), f"river {i}") for i in range(num_passages))
    return Case(str(number), "qa", "which bridge opens?", ("none",), passages)


@pytest.fixture
def model() -> PreTrainedModel:
    return random_model(num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def spans(tokenizer: PreTrainedTokenizerFast) -> PromptSpans:
    return spans_of(tokenizer, case_of(1))


@pytest.fixture
def ingested(make_engine: MakeEngine, model: PreTrainedModel) -> Callable[..., BlendEngine]:
    """Makes an engine that has ingested the passages of `case_of(1)`."""

    def make(**options: object) -> BlendEngine:
        engine = make_engine(model=model, **options)
        texts = [passage.prompt_text for passage in case_of(1).passages]
        assert engine.ingest(texts, head=head_ids(engine.tokenizer), progress=False).chunks == 3
        return engine

    return make


def test_passages_are_found_where_they_stand(tokenizer: PreTrainedTokenizerFast, spans: PromptSpans) -> None:
    assert len(spans.chunks) == 3
    assert spans.chunks[0][0] == len(head_ids(tokenizer))
    for (start, end), passage in zip(spans.chunks, case_of(1).passages, strict=True):
        assert passage.prompt_text.startswith(tokenizer.decode(spans.ids[start : end - 1]))
    assert "which bridge opens?" in tokenizer.decode(spans.ids[spans.question_start :])
    expected = [position for span in spans.chunks[1:] for position in range(*span)]
    assert spans.later.tolist() == expected


@pytest.mark.parametrize("selector", SELECTORS)
def test_attention_deviates_without_recomputing_and_not_with_all(
    selector: str, model: PreTrainedModel, ingested: Callable[..., BlendEngine], spans: PromptSpans
) -> None:
    deviation = PromptDeviation(model, ingested(), spans)
    nothing, everything = deviation.attention(selector, 0.0), deviation.attention(selector, 1.0)
    assert nothing.question > 1e-2 and nothing.last > 1e-3
    assert everything.question < 1e-4 and everything.last < 1e-4
    assert everything.computed == 1.0


def test_attention_deviation_is_what_eager_attention_says(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    """The weights of transformers' own eager attention, over the cache as the blend left it and over a full one."""
    engine = ingested()
    ids, rows = torch.from_numpy(spans.ids).long()[None], len(spans.ids) - spans.question_start
    blended = engine.prefill(spans.ids.tolist(), selector="none").cache
    measured = PromptDeviation(model, engine, spans).attention("none", 0.0)
    blended.crop(-rows)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        full = model(ids, output_attentions=True).attentions
        ours = model(ids[:, -rows:], cache=blended, output_attentions=True).attentions
    norms = [
        (a[0, :, -rows:].mean(0) - b[0, :, -rows:].mean(0))[:, : spans.question_start]
        for a, b in zip(ours[:-1], full[:-1], strict=True)
    ]
    assert measured.question == pytest.approx(np.mean([float(norm.norm()) for norm in norms]), rel=1e-3)
    assert measured.last == pytest.approx(np.mean([float(norm[-1].norm()) for norm in norms]), rel=1e-3)


def test_recording_leaves_the_model_as_it_was(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    engine = ingested()
    before = engine.prefill(spans.ids.tolist(), selector="anchor", recompute_ratio=0.2)
    measured = PromptDeviation(model, engine, spans).attention("anchor", 0.2)
    after = engine.prefill(spans.ids.tolist(), selector="anchor", recompute_ratio=0.2)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(before.logits, after.logits)
    assert measured.computed == before.stats.recompute_ratio > 0.2  # the probe's rows are charged


def test_a_question_that_is_stored_itself_is_refused(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = ingested()
    question = tokenizer.decode(spans.ids[spans.question_start :])
    engine.ingest([question], head=head_ids(tokenizer), progress=False)
    with pytest.raises(ValueError, match="part of the question is stored"):
        PromptDeviation(model, engine, spans).attention("none", 0.0)


def test_unprimed_caches_are_exact_in_layer_0_and_in_the_first_chunk(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    kv = PromptDeviation(model, ingested(), spans).kv()
    assert kv.shape == (NUM_LAYERS, len(spans.ids))
    assert kv[0].max() < 1e-5
    assert kv[:, slice(*spans.chunks[0])].max() < 1e-5
    assert kv[1:, spans.later].min() > 1e-4


def test_primed_caches_are_exact_in_layer_0_only(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    kv = PromptDeviation(model, ingested(prime=random_text(999), exact_first=False), spans).kv()
    assert kv[0].max() < 1e-5
    assert kv[1:, slice(*spans.chunks[0])].mean() > 1e-3


def test_kv_deviation_is_relative_to_the_rows(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    engine = ingested()
    token = int(spans.later[5])
    kv = PromptDeviation(model, engine, spans).kv()[2, token]
    ours = engine.prefill(spans.ids.tolist(), selector="none").cache.layers[2]
    full = engine.prefill(spans.ids.tolist(), reuse=False).cache.layers[2]
    parts = []
    for got, expected in ((ours.keys, full.keys), (ours.values, full.values)):
        rows = expected[0].transpose(0, 1).flatten(1)  # (num_tokens, all heads)
        parts.append((got[0, :, token].flatten() - rows[token]).norm() / rows.norm(dim=1).mean())
    assert kv == pytest.approx(float(((parts[0] ** 2 + parts[1] ** 2) / 2) ** 0.5), rel=1e-4)


def test_nothing_stored_is_an_error(make_engine: MakeEngine, model: PreTrainedModel, spans: PromptSpans) -> None:
    with pytest.raises(ValueError, match="nothing of the prompt is stored"):
        PromptDeviation(model, make_engine(model=model), spans).kv()


def test_spearman_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 2, 1, 4, 3: covariance 1.5 / 4, variances 4.5 / 4 and 5 / 4.
    assert spearman([10, 20, 20, 90], [2, 1, 4, 3]) == pytest.approx(1.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([5, 5, 5], [1, 2, 3]) == 0.0


def test_lines_say_what_was_measured() -> None:
    """Two prompts with made-up deviations, worked by hand."""
    unprimed = CacheDeviation(
        reuse=np.array([[2.0, 1.0], [4.0, 1.0]]),
        attention={"heads": np.array([[[2.0, 1.0, 0.0], [1.0, 0.5, 0.5]], [[4.0, 1.0, 0.0], [3.0, 0.5, 0.7]]])},
        later=[
            np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]),
            np.array([[0.0, 0.0], [5.0, 4.0], [6.0, 7.0]]),
        ],
        first=[np.zeros((3, 2)), np.zeros((3, 1))],
    )
    primed = CacheDeviation(
        reuse=np.array([[1.0, 1.0], [1.0, 1.0]]),
        attention={"heads": np.array([[[1.0, 0.2, 0.0], [0.0, 0.0, 1.0]]] * 2)},
        later=[kv / 2 for kv in unprimed.later],
        first=[np.full((3, 2), 0.25), np.full((3, 1), 1.0)],
    )
    measured = {"unprimed": unprimed, "primed": primed}
    lines = attention_lines(measured, (0.0, 0.5))
    assert [(line.cache, line.selector) for line in lines] == [("unprimed", "heads"), ("primed", "heads")]
    assert lines[0].question == pytest.approx([1.0, (0.5 + 0.75) / 2])
    assert lines[0].question_error == pytest.approx([0.0, 0.125])
    assert lines[0].last == pytest.approx([1.0, 0.5])
    assert lines[0].computed == pytest.approx([0.0, 0.6])
    assert lines[1].question == pytest.approx([(1 / 2 + 1 / 4) / 2, 0.0])  # by the unprimed reuse, not its own
    by_layer = {(line.cache, line.layer): line for line in deviation_lines(measured)}
    assert sorted({layer for _, layer in by_layer}) == [1, 2]
    assert by_layer["unprimed", 1].tokens == 5
    assert [by_layer["unprimed", 1].percentiles[i] for i in (0, 50, 100)] == [1.0, 3.0, 5.0]
    assert by_layer["primed", 1].percentiles[50] == 1.5
    assert (by_layer["unprimed", 2].first_chunk, by_layer["primed", 2].first_chunk) == (0.0, 0.5)
    for line in rank_lines(measured):
        assert line.layers == [1]
        assert [line.mean[0], line.lowest[0], line.highest[0]] == pytest.approx([0.0, -1.0, 1.0], abs=1e-12)


def test_measuring_takes_prompts_one_by_one(
    ingested: Callable[..., BlendEngine], model: PreTrainedModel, spans: PromptSpans
) -> None:
    measured = measure(model, ingested(), [spans, spans], selectors=("heads",), ratios=(0.0, 0.5))
    assert measured.attention["heads"].shape == (2, 2, 3)
    assert measured.later[0].shape == (NUM_LAYERS, len(spans.later))
    assert measured.first[0].shape == (NUM_LAYERS, spans.chunks[0][1] - spans.chunks[0][0])
    # Without a check layer, nothing recomputed is plain reuse.
    assert measured.attention["heads"][:, 0, :2] == pytest.approx(measured.reuse)
    assert (measured.attention["heads"][:, 1, 2] == pytest.approx(0.5, abs=0.02)) and (measured.reuse > 0).all()


def test_three_figures_and_their_numbers_are_drawn(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    model.config.name_or_path = "/some/where/tiny"
    out = tmp_path / "new" / "figures"
    written = draw_figures(model, tokenizer, [case_of(1), case_of(2), case_of(3, num_passages=1)], out)
    assert sorted(path.name for path in written) == [f"figure{i}.{kind}" for i in (6, 7, 8) for kind in ("json", "png")]
    assert sorted(out.iterdir()) == sorted(written), "the caches are gone"
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in written if path.suffix == ".json"}
    for record in records.values():
        assert "tiny, n = 2 prompts" in record["title"] and "some" not in record["title"]
        assert {line["cache"] for line in record["lines"]} == {"unprimed", "primed"}
    for line in records["figure6"]["lines"]:
        assert line["ratios"] == list(RATIOS)
        assert line["question"][-1] < 1e-3 < line["question"][0]
        if (line["cache"], line["selector"]) in {("unprimed", "heads"), ("unprimed", "random")}:
            assert line["question"][0] == pytest.approx(1.0)
    assert {line["selector"] for line in records["figure6"]["lines"]} == set(SELECTORS)
    assert all(line["percentiles"] == sorted(line["percentiles"]) for line in records["figure7"]["lines"])
    unprimed, primed = (
        max(line["first_chunk"] for line in records["figure7"]["lines"] if line["cache"] == cache)
        for cache in ("unprimed", "primed")
    )
    assert unprimed < 1e-5 < 1e-3 < primed
    assert all(line["layers"] == [1, 2] for line in records["figure8"]["lines"])


def test_cases_without_two_passages_cannot_be_drawn(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="at least two passages"):
        draw_figures(model, tokenizer, [case_of(1, num_passages=1)], tmp_path)


def test_without_matplotlib_the_message_says_what_to_install(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[bench\]"'):
        draw_figures(model, tokenizer, [case_of(1)], tmp_path)
