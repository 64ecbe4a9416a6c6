"""The promises on a real model and real text: SmolLM2-135M-Instruct and the Python language reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rag_blend import BlendEngine
from rag_blend.demo import demo_model_dir
from rag_blend.selectors.spread import SpreadSelector

SYSTEM = "<|im_start|>system\nYou answer questions about Python.<|im_end|>\n<|im_start|>user\n"
HEAD = SYSTEM + "Context information is below.\n---------------------\n"
QUESTION = "\n---------------------\nWhat does the with statement do?<|im_end|>\n<|im_start|>assistant\n"
CHUNK = 200


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)


@pytest.fixture(scope="module")
def chunks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    texts = []
    for name in ("with", "try", "for", "while", "if", "import", "class", "lambda", "yield", "raise", "assert", "del"):
        ids = tokenizer(topics[name], add_special_tokens=False)["input_ids"][:CHUNK]
        texts.append(tokenizer.decode(ids).strip())
    return texts


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def primed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, storage: Path, chunks: list[str]
) -> Iterator[BlendEngine]:
    with BlendEngine(model, tokenizer, storage, prime_tokens=256) as engine:
        assert engine.ingest(chunks, head=HEAD, progress=False).chunks == len(chunks)
        yield engine


@pytest.fixture(scope="module")
def unprimed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, storage: Path, chunks: list[str]
) -> Iterator[BlendEngine]:
    with BlendEngine(model, tokenizer, storage, prime="none") as engine:
        engine.ingest(chunks, head=HEAD, progress=False)
        yield engine


@pytest.fixture(scope="module")
def prompt(chunks: list[str]) -> str:
    return HEAD + "\n\n".join(chunks[i] for i in (3, 0, 5, 1, 7)) + QUESTION


@pytest.fixture(scope="module")
def full(primed: BlendEngine, prompt: str) -> torch.Tensor:
    return primed.prefill(prompt, reuse=False).logits


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    return float(
        torch.nn.functional.kl_div(other.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="sum")
    )


def test_full_prefill_is_that_of_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, full: torch.Tensor
) -> None:
    with torch.no_grad():
        stock = model(**tokenizer(prompt, return_tensors="pt", add_special_tokens=False)).logits[0, -1]
    assert torch.allclose(full, stock, atol=1e-3)


def test_ratio_one_is_full_prefill(primed: BlendEngine, prompt: str, full: torch.Tensor) -> None:
    everything = primed.prefill(prompt, recompute_ratio=1.0)
    assert everything.stats.hits >= 5
    assert float((everything.logits - full).abs().max() / full.abs().max()) < 1e-4
    answer = primed.generate(prompt, 16, recompute_ratio=1.0, do_sample=False)
    assert answer.token_ids == primed.generate(prompt, 16, reuse=False, do_sample=False).token_ids


def test_head_and_first_unprimed_chunk_are_exact(unprimed: BlendEngine, chunks: list[str]) -> None:
    prompt = HEAD + chunks[2] + QUESTION
    exact = unprimed.prefill(prompt)
    assert exact.stats.mode == "prefix" and exact.stats.prefix_tokens > 190
    assert kl(unprimed.prefill(prompt, reuse=False).logits, exact.logits) < 1e-4  # float16 storage


def test_nearly_everything_is_reused(primed: BlendEngine, prompt: str, chunks: list[str]) -> None:
    stats = primed.prefill(prompt).stats
    assert stats.mode == "blend" and stats.hits == 6 and stats.misses == 0
    assert 0.09 < stats.recompute_ratio < 0.1  # the look ahead is charged
    assert 0.05 < stats.recomputed_tokens / (stats.reused_tokens + stats.recomputed_tokens) < 0.09
    assert stats.fresh_tokens < 40 and stats.prefix_tokens + stats.reused_tokens > 0.85 * stats.prompt_tokens


def test_priming_brings_the_answer_closer(
    primed: BlendEngine, unprimed: BlendEngine, prompt: str, full: torch.Tensor
) -> None:
    """Three prompts' mean KL to full prefill: primed reuse is closer than unprimed reuse."""
    head, rest = prompt.split("---------------------\n", 1)
    prompts = [prompt, prompt.replace("the with statement", "a while loop"), prompt.replace("What", "When and what")]
    assert head + "---------------------\n" == HEAD and rest
    gaps = {"primed": 0.0, "unprimed": 0.0}
    for text in prompts:
        reference = primed.prefill(text, reuse=False).logits
        gaps["primed"] += kl(reference, primed.prefill(text, selector="none").logits)
        gaps["unprimed"] += kl(reference, unprimed.prefill(text, selector="none").logits)
    assert gaps["primed"] < 0.8 * gaps["unprimed"]


class _Unshifted(SpreadSelector):
    shifts_rest = False


def test_rows_that_follow_their_chunk_bring_the_answer_closer(primed: BlendEngine, chunks: list[str]) -> None:
    """Mean KL to full prefill over prompts with other chunks and questions, the same tokens recomputed."""
    following = unshifted = 0.0
    for first in range(4):
        context = "\n\n".join(chunks[(first + step) % len(chunks)] for step in (0, 5, 3, 8, 1))
        text = HEAD + context + QUESTION.replace("What does", ("What does", "When does", "How does", "Why does")[first])
        reference = primed.prefill(text, reuse=False).logits
        following += kl(reference, primed.prefill(text, selector="spread").logits)
        unshifted += kl(reference, primed.prefill(text, selector=_Unshifted()).logits)
    assert following < 0.9 * unshifted


def test_the_published_method_is_charged_for_its_selection(unprimed: BlendEngine, prompt: str) -> None:
    stats = unprimed.prefill(prompt, selector="hkvd").stats
    assert 0.15 + 1.5 / 30 < stats.recompute_ratio < 0.22


def test_another_process_would_find_the_same(
    primed: BlendEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, storage: Path, prompt: str
) -> None:
    with BlendEngine(model, tokenizer, storage, prime_tokens=256) as again:
        assert again.num_chunks == primed.num_chunks
        assert torch.equal(again.prefill(prompt).logits, primed.prefill(prompt).logits)
