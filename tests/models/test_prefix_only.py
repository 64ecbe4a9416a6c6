"""Models that cannot be blended are refused by name, or served: exactly, and from where an earlier prompt ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from conftest import random_model, random_text, small_tokenizer
from exactness import assert_close, full_logits
from models.test_windows import WINDOW, WINDOWED
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from rag_blend import BlendEngine, UnsupportedModelError

ROWS: dict[str, dict[str, Any]] = {  # a row per token: any number of first tokens can be reused
    **WINDOWED,
    "llama4_text": {
        "attention_chunk_size": WINDOW, "head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 1,
    },
    "gpt2": {"n_positions": 1024},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "bloom": {},
    "falcon": {"alibi": True},
    "deepseek_v3": {"num_key_value_heads": 4},
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {  # states that sum up all tokens: a beginning is reused whole or not at all
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
NOTHING: dict[str, dict[str, Any]] = {
    "mamba": {},  # its cache does not say how long it is
    # transformers goes on from its states by single tokens only
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "phi3": {  # rows depend on the prompt's length
        "sliding_window": WINDOW, "rope_parameters": {
            "rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0, "factor": 4.0,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        },
    },
}  # fmt: skip


_NEWEST = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="caches with states were other classes"
)


def model_of(kinds: dict[str, dict[str, Any]], family: str) -> PreTrainedModel:
    return random_model(family, **kinds[family])


def engine_of(model: PreTrainedModel) -> BlendEngine:
    return BlendEngine(model, small_tokenizer(), None, prime="none", on_unsupported="full")


def ids_of(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = torch.randint(5, 500, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def greedy(model: PreTrainedModel, ids: list[int]) -> list[int]:
    prompt: Any = torch.tensor([ids])
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    answer: list[int] = whole[0, len(ids) :].tolist()
    return answer


@pytest.fixture(params=ROWS)
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    with engine_of(model_of(ROWS, request.param)) as engine:
        yield engine


@pytest.mark.parametrize("family", ROWS)
def test_it_is_refused_by_name(family: str) -> None:
    model = model_of(ROWS, family)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} \(model_type '{family}'\)"):
        BlendEngine(model, small_tokenizer(), None)


def test_any_common_beginning_is_reused(engine: BlendEngine) -> None:
    assert engine.mode == "prefix" and not engine.can_blend and engine.policy.full_prefill
    first = ids_of(1, 70)
    assert engine.prefill(first).stats.mode == "full"
    for ids, reused in (([*first, *ids_of(2, 30)], 70), ([*first[:40], *ids_of(3, 20)], 40), (first, 69)):
        prefill = engine.prefill(ids)
        assert prefill.stats.mode == "prefix"
        assert (prefill.stats.prefix_tokens, prefill.stats.fresh_tokens) == (reused, len(ids) - reused)
        assert_close(prefill.logits, full_logits(engine._model, ids))


def test_answers_are_the_models_own_over_turns(engine: BlendEngine) -> None:
    ids = ids_of(1, 60)
    for turn in range(3):
        answer = engine.generate(ids, 8, do_sample=False)
        assert answer.token_ids == greedy(engine._model, ids)
        assert answer.stats.mode == ("prefix" if turn else "full")
        ids = [*ids, *answer.token_ids, *ids_of(turn, 10)]


def test_what_is_not_to_be_reused_is_not(engine: BlendEngine) -> None:
    ids = ids_of(1, 60)
    assert engine.ingest([random_text(1)], progress=False).skipped == 1
    engine.prefill(ids)
    assert engine.prefill(ids, reuse=False).stats.mode == "full"
    assert engine.prefill(ids, recompute_ratio=1.0).stats.mode == "full"
    engine.forget(["anything"])
    assert engine.prefill(ids).stats.mode == "full"


@_NEWEST
@pytest.mark.parametrize("family", STATES)
def test_states_are_reused_whole(family: str) -> None:
    with engine_of(model_of(STATES, family)) as engine:
        assert engine.mode == "prefix"
        first = ids_of(1, 60)
        engine.prefill(first)
        for ids, reused in (([*first, *ids_of(2, 20)], 60), ([*first[:50], *ids_of(3, 20)], 0), (first, 0)):
            prefill = engine.prefill(ids)
            assert prefill.stats.prefix_tokens == reused
            assert_close(prefill.logits, full_logits(engine._model, ids))
        ids = ids_of(4, 40)
        for turn in range(3):
            answer = engine.generate(ids, 8, do_sample=False)
            assert answer.token_ids == greedy(engine._model, ids)
            assert answer.stats.mode == ("prefix" if turn else "full")
            ids = [*ids, *answer.token_ids, *ids_of(turn, 10)]


@_NEWEST
@pytest.mark.parametrize("family", NOTHING)
def test_or_nothing_is_reused(family: str) -> None:
    with engine_of(model_of(NOTHING, family)) as engine:
        assert engine.mode == "full"
        ids = ids_of(1, 60)
        for _ in range(2):
            prefill = engine.prefill(ids)
            assert prefill.stats.mode == "full"
            assert_close(prefill.logits, full_logits(engine._model, ids))


def test_an_encoder_decoder_is_refused_whatever_is_asked() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match=r"model_type 't5'.*encoder-decoder") as raised:
        BlendEngine(model, small_tokenizer(), None, on_unsupported="full")
    assert "on_unsupported" not in str(raised.value)


def test_a_model_of_images_is_refused_by_name() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        "gemma3", vision_config={"image_size": 28, "patch_size": 14, **vision}, text_config=text
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gemma3'.*other inputs than text"):
        BlendEngine(model, small_tokenizer(), None)
