"""Phi-3's `generate` drops the cache of prompts beyond the original window; a blend must survive that."""

from __future__ import annotations

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from exactness import HEAD, QUESTION, prompt_of

from rag_blend import BlendEngine

TEXTS = [random_text(seed) for seed in range(4)]


@pytest.mark.parametrize("window", [64, 1000])
def test_generate_uses_the_stored_rows_on_both_sides_of_the_window(window: int) -> None:
    model = random_model("phi3", "longrope", original_max_position_embeddings=window)
    rows: list[int] = []
    model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    with BlendEngine(model, small_tokenizer(), None, prime="none", selector="none") as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[1:], QUESTION)
        rows.clear()
        answer = engine.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)
        assert rows[0] == answer.stats.fresh_tokens and rows[1:] == [1]
        assert int(engine.prefill(ids).logits.argmax()) == answer.token_ids[0]
    assert "prepare_inputs_for_generation" not in vars(model)


def test_an_answer_that_crosses_the_window_is_that_of_the_model() -> None:
    """There the model computes everything anew, with the other frequencies, and so must we."""
    model = random_model("phi3", "longrope", original_max_position_embeddings=130)
    with BlendEngine(model, small_tokenizer(), None, prime="none") as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[1:2], QUESTION)
        assert len(ids) < 130
        stock = model.generate(torch.tensor([ids]), max_new_tokens=30, min_new_tokens=30, do_sample=False)
        answer = engine.generate(ids, max_new_tokens=30, min_new_tokens=30, do_sample=False, recompute_ratio=1.0)
        assert answer.stats.mode == "blend"
        assert answer.token_ids == stock[0, len(ids) :].tolist()
