"""Prompts answered by vLLM, against the same prompts in the Hugging Face engine on the same store.

vLLM has an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import random_text

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")

from vllm_server import CLOSE, HEAD, Server, counts_of, fields_of, full, ids_of, prompt_of, refreshed

from rag_blend import BlendEngine

pytest_plugins = ["serving_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
APART = 1e-2  # what blending without recompute does to this model is more
_fresh_seeds = count(100)


def ingested(hf: BlendEngine) -> str:
    """A text that no other test has, in the store."""
    text = random_text(next(_fresh_seeds))
    hf.ingest([text], head=HEAD, progress=False)
    return text


def entry_of(storage: Path, hf: BlendEngine, text: str) -> Path:
    """The file of a text's entry."""
    ids = np.asarray(hf.tokenizer(text)["input_ids"])
    (key,) = hf._catalog.keys_in(ids)
    (file,) = [path for path in storage.rglob("*") if path.is_file() and path.name.startswith(key)]
    return file


def test_plain_requests_are_what_vllm_always_answers(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    ids = ids_of(hf, prompt_of(corpus[:3]))
    answer = clean.ask_one(ids)
    assert answer.far_from(full(hf, ids)) < CLOSE
    assert answer.report is None and answer.cached == 0


@pytest.mark.parametrize(("selector", "ratio"), [("all", None), ("heads", 1.0), ("hkvd", 1.0)])
def test_everything_recomputed_is_a_plain_prefill(
    clean: Server, hf: BlendEngine, corpus: list[str], selector: str, ratio: float | None
) -> None:
    ids = ids_of(hf, prompt_of([corpus[3], corpus[1]]))
    answer = clean.ask_one(ids, fields_of(selector, ratio), 24)
    assert answer.far_from(full(hf, ids)) < CLOSE
    assert answer.token_ids == clean.ask_one(ids, None, 24).token_ids
    assert answer.report["rag_blend"]["recomputed_tokens"] > 100


@pytest.mark.parametrize(
    ("selector", "ratio"),
    [("heads", None), ("heads", 0.3), ("none", None), ("random", 0.2), ("hkvd", None), ("hkvd", 0.4)],
)
def test_a_blend_is_the_hugging_face_engines(
    clean: Server, hf: BlendEngine, corpus: list[str], selector: str, ratio: float | None
) -> None:
    """The same rows from the same store, the same selection, the exact mask."""
    ids = ids_of(hf, prompt_of([corpus[2], corpus[0], corpus[4]]))
    reference = hf.prefill(ids, selector=selector, recompute_ratio=ratio)
    answer = clean.ask_one(ids, fields_of(selector, ratio))
    assert answer.far_from(reference.logits) < CLOSE
    assert answer.far_from(full(hf, ids)) > APART
    assert answer.report["rag_blend"] == counts_of(reference.stats)


def test_text_between_chunks_is_computed(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    ids = ids_of(hf, prompt_of([corpus[5], random_text(50, 30), corpus[6], random_text(51, 40)]))
    answer = clean.ask_one(ids, fields_of())
    assert answer.far_from(hf.prefill(ids, selector="heads").logits) < CLOSE


def test_blended_blocks_never_serve_a_plain_request(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    ids = ids_of(hf, prompt_of(corpus[:3]))
    assert clean.ask_one(ids, fields_of("none")).far_from(full(hf, ids)) > APART
    for fields in (None, {"cache_salt": "another"}, fields_of("all")):
        answer = clean.ask_one(ids, fields)
        assert answer.far_from(full(hf, ids)) < CLOSE


def test_another_question_finds_the_blended_blocks(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    first, second = (ids_of(hf, prompt_of(corpus[:3], question)) for question in ("old new?", "red green blue?"))
    clean.ask_one(first, fields_of())
    answer = clean.ask_one(second, fields_of())
    assert answer.report["rag_blend"]["reused_tokens"] < 40, "most was in vLLM's own cache"
    assert answer.far_from(hf.prefill(second, selector="heads").logits) < CLOSE


def test_a_common_beginning_is_not_written_again(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    """The first chunk's blocks are shared, what follows differs."""
    first, second = ids_of(hf, prompt_of([corpus[0], corpus[1]])), ids_of(hf, prompt_of([corpus[0], corpus[2]]))
    clean.ask_one(first, fields_of())
    answers = clean.ask([(second, fields_of()), (first, fields_of())])
    for ids, answer in zip((second, first), answers, strict=True):
        assert answer.far_from(hf.prefill(ids, selector="heads").logits) < CLOSE


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": fields_of()["kv_transfer_params"]},
        {**fields_of(), "cache_salt": "guessed"},
        {**fields_of(namespace="other"), "cache_salt": fields_of()["cache_salt"]},
        fields_of("anchor"),
        fields_of("spread"),
        fields_of("heads", 2.0),
        fields_of(namespace="unknown"),
    ],
    ids=["no salt", "wrong salt", "another tenant's salt", "selector", "selector that shifts", "ratio", "tenant"],
)
def test_a_wrong_wish_is_served_without_blending(
    clean: Server, hf: BlendEngine, corpus: list[str], fields: dict
) -> None:
    ids = ids_of(hf, prompt_of(corpus[:3]))
    answer = clean.ask_one(ids, fields)
    assert answer.far_from(full(hf, ids)) < CLOSE
    assert answer.report is None


def test_tenants_do_not_see_each_others_chunks(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    ids = ids_of(hf, prompt_of(corpus[:3]))
    answer = clean.ask_one(ids, fields_of(namespace="other"))
    assert answer.report == {"rag_blend": {"reused_tokens": 0, "recomputed_tokens": 0}}
    assert answer.far_from(full(hf, ids)) < CLOSE


def test_concurrent_mixed_requests_are_answered_as_each_alone(
    clean: Server, hf: BlendEngine, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt = Mock(wraps=clean.scheduler._preempt_request)
    monkeypatch.setattr(clean.scheduler, "_preempt_request", preempt)
    kinds = [None, fields_of(), fields_of("none"), fields_of("random", 0.2)]
    requests = []
    for number in range(16):
        chosen = [corpus[(number + step) % 8] for step in range(3)]
        requests.append((ids_of(hf, prompt_of(chosen, f"question {number % 5}?")), kinds[number % 4]))
    alone = []
    for ids, fields in requests:
        clean.forget_blocks()
        alone.append(clean.ask_one(ids, fields, 48).token_ids)
    clean.forget_blocks()
    assert not preempt.called
    together = [answer.token_ids for answer in clean.ask(requests, 48)]
    assert together == alone
    assert preempt.called, "too much room: nothing had to be preempted and resumed"


def test_hkvd_requests_of_different_prompts_can_be_blended_together(
    clean: Server, hf: BlendEngine, corpus: list[str]
) -> None:
    """In bursts that take turns with the other requests' tokens."""
    requests = [
        (ids_of(hf, prompt_of([corpus[number], corpus[number + 1]])), fields_of("hkvd", 0.2)) for number in range(4)
    ]
    for (ids, _), answer in zip(requests, clean.ask(requests, 24), strict=True):
        assert answer.far_from(hf.prefill(ids, selector="hkvd", recompute_ratio=0.2).logits) < CLOSE


def test_prompt_logprobs_are_computed_for_every_token(clean: Server, hf: BlendEngine, corpus: list[str]) -> None:
    from vllm import SamplingParams

    ids, fields = ids_of(hf, prompt_of(corpus[:2])), fields_of("none")
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=1, extra_args={"kv_transfer_params": fields["kv_transfer_params"]}
    )
    prompt = {"prompt_token_ids": ids, "cache_salt": fields["cache_salt"]}
    (output,) = clean.llm.generate([prompt], params, use_tqdm=False)
    assert len(output.prompt_logprobs) == len(ids) and output.num_cached_tokens == 0


def test_what_is_ingested_while_serving_is_found(server: Server, hf: BlendEngine, corpus: list[str]) -> None:
    ids = ids_of(hf, prompt_of([corpus[7], ingested(hf)]))
    refreshed(server, ids)
    answer = server.ask_one(ids, fields_of())
    assert answer.far_from(hf.prefill(ids, selector="heads").logits) < CLOSE
    assert answer.report["rag_blend"]["reused_tokens"] > 100


@pytest.mark.parametrize("damage", ["gone", "cut", "last layer"])
def test_damaged_entries_are_recomputed(
    server: Server, hf: BlendEngine, corpus: list[str], storage: Path, damage: str
) -> None:
    text = ingested(hf)
    ids = ids_of(hf, prompt_of([corpus[0], text, corpus[1]]))
    refreshed(server, ids)
    file = entry_of(storage, hf, text)
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data if damage == "last layer" else data[: len(data) // 2])
    answer = server.ask_one(ids, fields_of())
    reference = hf.prefill(ids, selector="heads")
    assert reference.stats.misses == 1
    assert answer.far_from(reference.logits) < CLOSE
    assert answer.report["rag_blend"]["reused_tokens"] == reference.stats.reused_tokens + reference.stats.prefix_tokens


def test_a_store_that_does_not_answer_costs_a_recompute_and_is_used_again_later(
    clean: Server, hf: BlendEngine, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers' store alone: what the scheduler's half has promised cannot be read."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    ids = ids_of(hf, prompt_of([corpus[6], corpus[3]]))
    with monkeypatch.context() as broken:
        broken.setattr(get_kv_transfer_group()._blender._backend, "open", Mock(side_effect=OSError("planted")))
        answer = clean.ask_one(ids, fields_of("none"))
    assert answer.far_from(full(hf, ids)) < CLOSE
    assert answer.report["rag_blend"]["reused_tokens"] == 0
    clean.forget_blocks()
    assert clean.ask_one(ids, fields_of("none")).report["rag_blend"]["reused_tokens"] > 100


def test_a_store_of_another_dtype_is_a_miss(clean: Server, make_hf: Callable[..., BlendEngine]) -> None:
    """What a half-precision model computed is another cache, and so is what is stored in another dtype."""
    half = make_hf(dtype=torch.bfloat16, reuse_when="possible")
    text = random_text(next(_fresh_seeds))
    half.ingest([text], head=HEAD, progress=False)
    ids = ids_of(half, prompt_of([text]))
    refreshed(clean, ids)
    assert clean.ask_one(ids, fields_of()).report["rag_blend"]["reused_tokens"] <= len(ids_of(half, HEAD))
