"""Attention that slides over a window: as exact as any, and blended only where a calibration has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import known_families, random_model, random_text, small_tokenizer
from exactness import (
    HEAD,
    QUESTION,
    ExactRows,
    assert_a_store_gives_back_what_it_was_given,
    assert_close,
    blend_over_exact_rows,
    full_cache,
    full_logits,
    prompt_of,
)
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rag_blend import BlendEngine, UnsupportedModelError
from rag_blend.calibration import Verdict
from rag_blend.evaluation import Candidate, calibrate, cases_from_chunks
from rag_blend.match import Match
from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.models.attention import FewRows
from rag_blend.plan import plan_blend
from rag_blend.probe import ProbePass
from rag_blend.rows import RowSet
from rag_blend.selftest import check_model
from rag_blend.storage.memory import MemoryBackend

WINDOW = 16  # tokens, so that the prompts below are far beyond it
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "head_dim": 16}
_UPPER = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW}  # layers 2 and 3 slide
_THETAS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": _MIXED,  # with soft caps
    "gemma3_text": {**_MIXED, "rope_parameters": _THETAS},
    "cohere2": _MIXED,  # the other layers have no RoPE
    "exaone4": {**_MIXED, "sliding_window_pattern": 2},  # the same
    "olmo3": _MIXED,
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},  # with sinks
    "ministral": _MIXED,
    "mistral": {"sliding_window": WINDOW},  # every layer
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "head_dim": 16},
    "phi3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2": _UPPER,
    "qwen3": {**_UPPER, "head_dim": 16},
    "smollm3": {**_UPPER, "layer_types": _MIXED["layer_types"], "no_rope_layers": [1, 0, 1, 1]},
}
WINDOWED = {family: {"num_hidden_layers": 4, **changes} for family, changes in known_families(_FAMILIES).items()}
# In layer 0 keys depend on nothing but tokens and places; the other way round, it is of the other type.
BOTH_WAYS = [(family, {}) for family in WINDOWED] + [
    (family, {"layer_types": ["full_attention", "sliding_attention"] * 2})
    for family, changes in WINDOWED.items()
    if "layer_types" in changes
]
ROPE_BY_TYPE = pytest.mark.skipif("gemma3_text" not in WINDOWED, reason="no family here has a RoPE for each type")
TEXTS = [random_text(seed) for seed in range(5)]
OPTIONS: dict[str, Any] = {
    "prime": "none", "kv_dtype": torch.float32, "recompute_ratio": 0.0, "prefix_cache_bytes": 0,
    "on_unsupported": "measured",
}  # fmt: skip
VERDICT = Verdict("heads", None, True, 0.02, 0.97, 0.01, 0.99, 0.1, 3.0, 24, "2026-01-01")


def windowed_model(family: str, **changes: Any) -> PreTrainedModel:
    return random_model(family, **{**WINDOWED[family], **changes})


def random_ids(num_tokens: int) -> torch.Tensor:
    return torch.randint(5, 500, (1, num_tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=WINDOWED)
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    with BlendEngine(windowed_model(request.param), small_tokenizer(), None, **OPTIONS) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        yield engine


class TestExactness:
    def test_ratio_one_is_full_prefill(self, engine: BlendEngine) -> None:
        ids = prompt_of(engine, HEAD, TEXTS[1:4], QUESTION)
        prefill = engine.prefill(ids, recompute_ratio=1.0)
        assert len(ids) > 10 * WINDOW and prefill.stats.mode == "blend" and prefill.stats.reused_tokens == 0
        assert_close(prefill.logits, full_logits(engine._model, ids))

    def test_the_first_chunk_is_exact(self, engine: BlendEngine) -> None:
        ids = prompt_of(engine, HEAD, TEXTS[:1], QUESTION)
        prefill = engine.prefill(ids)
        assert prefill.stats.mode == "prefix" and prefill.stats.prefix_tokens > 60
        assert_close(prefill.logits, full_logits(engine._model, ids))

    def test_a_recomputed_token_sees_exactly_what_its_layers_let_it_see(self, engine: BlendEngine) -> None:
        ids = random_ids(80)
        adapter = adapter_for(engine._model, windows=True)
        logits, cache = blend_over_exact_rows(adapter, ids, [4, 9, 10, 11, 30, 44, 70])
        assert_close(logits[-1], full_logits(engine._model, ids[0].tolist()))
        for got, wanted in zip(cache.layers, full_cache(engine._model, ids[0].tolist()).layers, strict=True):
            assert_close(got.keys, wanted.keys)
            assert_close(got.values, wanted.values)

    def test_greedy_text_is_that_of_the_model(self, engine: BlendEngine) -> None:
        ids = prompt_of(engine, HEAD, TEXTS[1:4], QUESTION)
        stock = engine._model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        answers = engine.generate_batch([ids, ids[30:]], max_new_tokens=12, do_sample=False, recompute_ratio=1.0)
        assert answers[0].token_ids == stock and answers[0].stats.mode == "blend"

    def test_the_question_s_attention_is_seen(self, engine: BlendEngine) -> None:
        """That of a layer without a window, if there is one among those that are listened to."""
        adapter = adapter_for(engine._model, windows=True)
        ids = random_ids(60)
        plan = plan_blend(60, [], [Match("", 3, 45, 0, 45)])
        received, _ = ProbePass(adapter, plan, ExactRows(full_cache(adapter.model, ids[0].tolist()))).run(ids)
        sees_everything = adapter.window(2) is None
        assert (received[3:30].min() > 0) == sees_everything
        has_sinks = engine._model.config.model_type == "gpt_oss"
        assert received.sum() < 1.0 if has_sinks else np.isclose(received.sum(), 1.0, atol=1e-3)


@pytest.mark.parametrize(("family", "changes"), BOTH_WAYS)
def test_a_moved_chunk_has_the_keys_of_its_new_place(family: str, changes: dict[str, Any]) -> None:
    with BlendEngine(windowed_model(family, **changes), small_tokenizer(), None, **OPTIONS) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[3:5], QUESTION)
        prefill = engine.prefill(ids)
        assert prefill.stats.reused_tokens > 40
        got, expected = prefill.cache.layers[0], full_cache(engine._model, ids).layers[0]
        assert_close(got.keys, expected.keys)
        assert_close(got.values, expected.values)


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_dtype": None}
    assert_a_store_gives_back_what_it_was_given(windowed_model("gemma2"), TEXTS, tmp_path, **options)


class TestSelfTest:
    """It sees windows that are far longer than its prompt, since it shortens them."""

    @pytest.fixture
    def adapter(self) -> ModelAdapter:
        return adapter_for(windowed_model("ministral", sliding_window=512), windows=True)

    def test_it_leaves_the_window_as_it_was(self, adapter: ModelAdapter) -> None:
        check_model(adapter)
        assert adapter.config.sliding_window == 512 and adapter.window(0) == 512 and adapter.window(1) is None

    @pytest.mark.parametrize("wrong", [lambda window: None, lambda window: window + 1, lambda window: window - 1])
    def test_a_wrong_window_is_noticed(self, wrong: Any, adapter: ModelAdapter, monkeypatch: Any) -> None:
        right = RowSet.mask
        monkeypatch.setattr(RowSet, "mask", lambda rows, window: right(rows, window and wrong(window)))
        with pytest.raises(UnsupportedModelError, match="partial recompute differs"):
            check_model(adapter)

    @ROPE_BY_TYPE
    def test_one_rope_for_all_layers_is_noticed(self, monkeypatch: Any) -> None:
        adapter = adapter_for(windowed_model("gemma3_text"), windows=True)
        monkeypatch.setattr(adapter.rotary, "_type_of_layer", [0] * 4)
        with pytest.raises(UnsupportedModelError, match="moving the keys of layer 0"):
            check_model(adapter)


class TestPermission:
    def test_by_default_it_is_refused_and_the_way_out_is_named(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'gemma2'.* slides over 16 tokens.*rag-blend calibrate"):
            BlendEngine(windowed_model("gemma2"), small_tokenizer(), None)

    def test_without_a_calibration_it_is_served_in_full(self, caplog: pytest.LogCaptureFixture) -> None:
        with engine_on(MemoryBackend(), windowed_model("mistral")) as engine:
            assert engine.mode == "prefix" and engine.policy.full_prefill
            assert "run `rag-blend calibrate` on this store first" in caplog.text
            assert engine.ingest(TEXTS, progress=False).skipped == len(TEXTS)
            assert engine.prefill(random_ids(80)[0].tolist(), recompute_ratio=0.1).stats.mode == "full"

    def test_a_calibration_that_passes_lets_it_blend(self, ttfts: Callable[[float, float], None]) -> None:
        ttfts(1.0, 0.5)
        model, storage = windowed_model("cohere2"), MemoryBackend()
        found = calibrate(
            model, small_tokenizer(), cases_from_chunks(TEXTS, 2, 3), storage, 100.0, 0.0, [Candidate("heads")],
            progress=False, max_new_tokens=4, prime="none",
        )  # fmt: skip
        assert found.verdict.passed and 0.0 < found.verdict.kl
        with engine_on(storage, model) as engine:
            assert engine.mode == "blend" and str(engine.policy) == "heads (calibrated)"
            engine.ingest(TEXTS, head=HEAD, progress=False)
            ids = prompt_of(engine, HEAD, TEXTS[1:4], QUESTION)
            assert engine.generate(ids, 2).stats.mode == "blend"  # it is kept, and nothing exact may go on from it
            engine.adopt(replace(VERDICT, passed=False))
            assert engine.mode == "prefix" and engine.prefill(ids, recompute_ratio=0.1).stats.mode == "full"
            engine.adopt(found.verdict)
            assert engine.mode == "blend" and engine.prefill(ids).stats.mode == "blend"
        for other in ({"namespace": "other"}, {"prime": "some text"}):
            with engine_on(storage, model, **other) as engine:
                assert engine.mode == "prefix"
        with pytest.raises(UnsupportedModelError, match="on_unsupported='calibrated'"):
            BlendEngine(model, small_tokenizer(), storage, prime="none")

    def test_a_failed_one_does_not(self, caplog: pytest.LogCaptureFixture) -> None:
        model, storage = windowed_model("mistral"), MemoryBackend()
        with engine_on(storage, model, on_unsupported="measured") as engine:
            engine.adopt(replace(VERDICT, passed=False))
            assert engine.mode == "blend"
        for choice in ("calibrated", "full"):
            with engine_on(storage, model, on_unsupported=choice) as engine:
                engine.refresh()
                assert engine.mode == "prefix"
                ids = prompt_of(engine, HEAD, TEXTS[:2], QUESTION)
                assert [engine.generate(ids, 1).stats.prefix_tokens > 0 for _ in range(2)] == [False, True]
        assert "it failed its calibration" in caplog.text

    def test_other_models_are_served_or_errors(self) -> None:
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, eos_token_id=2))
        with engine_on(MemoryBackend(), gpt2) as engine:
            assert engine.mode == "prefix"
        with pytest.raises(UnsupportedModelError, match="no rotary") as raised:
            engine_on(MemoryBackend(), gpt2, on_unsupported="measured")
        assert "calibrated" not in str(raised.value)


def engine_on(storage: MemoryBackend, model: PreTrainedModel, **options: Any) -> BlendEngine:
    return BlendEngine(
        model, small_tokenizer(), storage, **{"prime": "none", "on_unsupported": "calibrated", **options}
    )


@pytest.mark.parametrize("family", known_families({"phi3": {}, "gemma3_text": {}}))
def test_a_window_that_no_prompt_fills_does_not_matter(family: str) -> None:
    """Phi-3-mini-128k states one of 262,144 tokens. Types of layers may have their own RoPE nevertheless."""
    with BlendEngine(windowed_model(family, sliding_window=1024), small_tokenizer(), None) as engine:
        assert engine.mode == "blend"


def test_attention_does_not_go_where_no_row_looks() -> None:
    """Blocks of rows take the keys of their windows only."""
    adapter = adapter_for(windowed_model("mistral"), windows=True)
    rows = RowSet(adapter, 400, torch.arange(100, 400))
    blocks = FewRows()._blocks_of(rows.mask(WINDOW), 1, torch.float32)
    assert [(block.near.start, block.near.stop) for block in blocks] == [(85, 196), (181, 292), (277, 388), (373, 400)]


@ROPE_BY_TYPE
def test_dynamic_rope_of_one_type_of_layers_is_refused() -> None:
    config = AutoConfig.for_model("gemma3_text").rope_parameters
    dynamic = {**config["full_attention"], "rope_type": "dynamic", "factor": 4.0}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        adapter_for(windowed_model("gemma3_text", rope_parameters={**_THETAS, "full_attention": dynamic}), windows=True)
