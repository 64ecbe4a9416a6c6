"""Every family keeps every promise, with every RoPE type it has, on both sides of the original window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ALL_FAMILIES, FAMILY_ROPES, random_model, random_text, small_tokenizer
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
from transformers import PreTrainedModel

from rag_blend import BlendEngine
from rag_blend.match import Match
from rag_blend.models import adapter_for
from rag_blend.plan import plan_blend
from rag_blend.probe import ProbePass

WINDOW = 64  # tokens, of the RoPE types that have an original window
TEXTS = [random_text(seed) for seed in range(5)]
DEEPER = {"smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}}
SHORT = random_text(9, 20)  # with its head it is shorter than the window
OPTIONS: dict[str, Any] = {"prime": "none", "kv_dtype": torch.float32, "recompute_ratio": 0.0}


@dataclass
class Case:
    """One random model with its texts stored."""

    family: str
    rope: str
    model: PreTrainedModel
    engine: BlendEngine

    def prompt(self, *texts: str, head: str = HEAD) -> list[int]:
        return prompt_of(self.engine, head, list(texts), QUESTION)


@pytest.fixture(scope="module", params=FAMILY_ROPES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family, rope = request.param
    model = random_model(family, rope)
    with BlendEngine(model, small_tokenizer(), None, prefix_cache_bytes=2**24, **OPTIONS) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        engine.ingest([SHORT], head=HEAD, progress=False)
        yield Case(family, rope, model, engine)


# For what does not depend on how a layer's angles are made, only on whether a prompt's length changes them.
SOME_ROPES = pytest.mark.parametrize(
    "case",
    [(family, rope) for family, rope in FAMILY_ROPES if rope in {"default", "longrope"}],
    indirect=True,
    ids="-".join,
)


def test_ratio_one_is_full_prefill(case: Case) -> None:
    ids = case.prompt(*TEXTS[1:4])
    assert len(ids) > WINDOW
    prefill = case.engine.prefill(ids, recompute_ratio=1.0)
    assert prefill.stats.mode == "blend" and prefill.stats.hits == 4
    assert prefill.stats.reused_tokens == prefill.stats.prefix_tokens == 0
    assert_close(prefill.logits, full_logits(case.model, ids))


def test_the_first_chunk_is_exact(case: Case) -> None:
    for text in (TEXTS[0], SHORT):
        ids = case.prompt(text)
        ids = ids[: WINDOW - 1] if text == SHORT else ids
        prefill = case.engine.prefill(ids)
        assert prefill.stats.mode == "prefix" and prefill.stats.prefix_tokens > 45
        assert_close(prefill.logits, full_logits(case.model, ids))


def test_a_moved_chunk_has_the_keys_of_its_new_place(case: Case) -> None:
    ids = case.prompt(*TEXTS[3:5])
    prefill = case.engine.prefill(ids)
    assert prefill.stats.reused_tokens > 40
    expected = full_cache(case.model, ids)
    assert_close(prefill.cache.layers[0].keys, expected.layers[0].keys)
    assert_close(prefill.cache.layers[0].values, expected.layers[0].values)
    assert (prefill.cache.layers[1].values - expected.layers[1].values).abs().max() > 1e-3, "nothing was reused"


@SOME_ROPES
def test_a_recomputed_token_sees_exactly_what_is_in_front_of_it(case: Case) -> None:
    ids = torch.randint(5, 500, (1, WINDOW + 16), generator=torch.Generator().manual_seed(1))
    logits, cache = blend_over_exact_rows(adapter_for(case.model), ids, [4, 9, 10, 11, 30, 44, 70])
    assert_close(logits[-1], full_logits(case.model, ids[0].tolist()))
    expected = full_cache(case.model, ids[0].tolist())
    for got, wanted in zip(cache.layers, expected.layers, strict=True):
        assert_close(got.keys, wanted.keys)
        assert_close(got.values, wanted.values)


@SOME_ROPES
def test_an_earlier_prompt_is_continued_exactly(case: Case) -> None:
    first = torch.randint(5, 500, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    case.engine.prefill(first)
    longer = [*first, *reversed(first[:20])]
    prefill = case.engine.prefill(longer)
    assert prefill.stats.mode == "prefix" and prefill.stats.prefix_tokens == len(first)
    assert_close(prefill.logits, full_logits(case.model, longer))


@SOME_ROPES
def test_greedy_text_is_that_of_the_model(case: Case) -> None:
    for ids in (case.prompt(*TEXTS[1:4]), case.prompt(SHORT)[: WINDOW - 16]):
        stock = case.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        answer = case.engine.generate(ids, max_new_tokens=12, do_sample=False, recompute_ratio=1.0)
        assert answer.token_ids == stock
        assert answer.stats.mode == "blend"


@pytest.mark.parametrize("family", ["llama", "phi", "glm", "smollm3"])
def test_dynamic_rope_beyond_its_window(family: str) -> None:
    """The window is all that the model states as its own; engines let no longer prompt pass unless it is told later."""
    model = random_model(family, "dynamic")
    with BlendEngine(model, small_tokenizer(), None, **OPTIONS) as engine:
        rotary = model.get_decoder().rotary_emb
        rotary.original_max_seq_len = rotary.max_seq_len_cached = model.config.max_position_embeddings = WINDOW
        if adapter_for(model).rotary.same_angles(WINDOW * 2, WINDOW * 3, device=model.device):
            pytest.skip("this version of transformers has read the window before")
        engine.ingest(TEXTS, head=HEAD, progress=False)
        case = Case(family, "dynamic", model, engine)
        test_ratio_one_is_full_prefill(case)
        test_a_moved_chunk_has_the_keys_of_its_new_place(case)
        ids = case.prompt(TEXTS[0])  # its rows were computed in a shorter prompt, so they are an approximation here
        assert engine.prefill(ids).stats.mode == "blend"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_store_gives_back_what_it_was_given(family: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_dtype": None}
    assert_a_store_gives_back_what_it_was_given(random_model(family), TEXTS, tmp_path, **options)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_question_s_attention_is_seen(family: str) -> None:
    """Over exact rows, the look ahead sees attention that adds up to 1 and leaves out what is not there."""
    model = random_model(family, **DEEPER.get(family, {"num_hidden_layers": 4}))
    adapter = adapter_for(model)
    if not adapter.can_watch_attention:
        assert family in {"falcon", "falcon_new", "qwen2_moe"}  # the last one before transformers 5
        return
    ids = torch.randint(5, 500, (1, 60), generator=torch.Generator().manual_seed(1))
    plan = plan_blend(60, [], [Match("", 3, 45, 0, 45)])
    rows = ExactRows(full_cache(model, ids[0].tolist()))
    received, _ = ProbePass(adapter, plan, rows).run(ids)
    assert received[3:48].min() > 0
    assert np.isclose(received.sum(), 1.0, atol=1e-3)
