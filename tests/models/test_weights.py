"""LoRA and kin: what was cached with one adapter is never used with another, and the engine notices a switch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from exactness import HEAD, QUESTION, assert_close, full_logits, prompt_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from rag_blend import BlendEngine
from rag_blend.chunk import ModelFingerprint
from rag_blend.errors import ModelChangedError, UnsupportedModelError
from rag_blend.fingerprint import fingerprint_of
from rag_blend.models import WeightsWatch, bare_model
from rag_blend.storage.memory import MemoryBackend

peft = pytest.importorskip("peft")
TEXTS = [random_text(seed) for seed in range(4)]


def two_adapters(model: PreTrainedModel | None = None) -> Any:
    """A PEFT model with the adapters "one", which is at work, and "two"."""
    torch.manual_seed(1)
    settings = {"r": 4, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **settings)
    lora = peft.get_peft_model(model or random_model(), config, adapter_name="one")
    lora.add_adapter("two", peft.LoraConfig(target_modules=["q_proj", "k_proj"], **settings))
    return lora.eval()


def engine_of(model: Any, storage: Any = None, **options: Any) -> BlendEngine:
    return BlendEngine(model, small_tokenizer(), storage, prime="none", kv_dtype=torch.float32, **options)


def fingerprint(model: Any) -> ModelFingerprint:
    return fingerprint_of(bare_model(model), small_tokenizer(), torch.float32)


@pytest.fixture
def lora() -> Iterator[Any]:
    yield two_adapters()


def test_a_directory_of_an_adapter_names_its_model(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False}
    peft.get_peft_model(base, peft.LoraConfig(**settings)).save_pretrained(tmp_path / "adapter")
    small_tokenizer().save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    with BlendEngine.from_pretrained(tmp_path / "adapter", None, prime="none") as engine:
        engine.ingest(TEXTS, progress=False)
        assert engine.mode == "blend" and engine.num_chunks == len(TEXTS)


def test_a_model_with_an_adapter_blends(lora: Any) -> None:
    with engine_of(lora) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[1:], QUESTION)
        with_adapter = full_logits(lora, ids)
        prefill = engine.prefill(ids, recompute_ratio=1.0)
        assert prefill.stats.hits == 4
        assert_close(prefill.logits, with_adapter)
        assert_close(engine.prefill(ids[:60]).logits, full_logits(lora, ids[:60]))
        with lora.disable_adapter():
            assert (full_logits(lora, ids) - with_adapter).abs().max() > 1e-2


def test_every_state_has_a_fingerprint_of_its_own(lora: Any) -> None:
    found = [fingerprint(lora)]
    lora.set_adapter("two")
    found.append(fingerprint(lora))
    with lora.disable_adapter():
        found.append(fingerprint(lora))
    lora.merge_adapter()
    found.append(fingerprint(lora))
    assert len(set(found)) == 4
    lora.unmerge_adapter()
    lora.set_adapter("one")
    assert fingerprint(two_adapters()) == found[0]  # another process gets the same


def test_the_strength_of_an_adapter_counts(lora: Any) -> None:
    before = fingerprint(lora)
    for module in lora.modules():
        if isinstance(getattr(module, "scaling", None), dict) and "one" in module.scaling:
            module.scaling["one"] *= 2
    assert fingerprint(lora) != before


def test_a_switch_is_noticed_and_nothing_is_reused(lora: Any, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(lora) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[1:], QUESTION)
        first = prompt_of(engine, HEAD, TEXTS[:1], QUESTION)
        assert engine.prefill(ids).stats.mode == "blend"
        assert engine.prefill(first).stats.mode == "prefix"  # and is now kept in memory
        lora.set_adapter("two")
        with caplog.at_level(logging.WARNING):
            for prompt in (ids, first, first):
                prefill = engine.prefill(prompt)
                assert prefill.stats.mode == "full" and prefill.stats.hits == 0
                assert_close(prefill.logits, full_logits(lora, prompt))
        assert caplog.text.count("adapters or weights are not those") == 1
        with pytest.raises(ModelChangedError, match="nothing is ingested"):
            engine.ingest(["something new " * 20], progress=False)
        lora.set_adapter("one")
        assert engine.prefill(ids).stats.mode == "blend"
        prefill = engine.prefill(first)
        assert prefill.stats.prefix_tokens == len(first) - 1
        assert_close(prefill.logits, full_logits(lora, first))


def test_engines_with_different_adapters_share_a_store_and_a_model(lora: Any) -> None:
    storage = MemoryBackend()
    one = engine_of(lora, storage)
    lora.set_adapter("two")
    two = engine_of(lora, storage)
    assert two.ingest(TEXTS, head=HEAD, progress=False).chunks == len(TEXTS)
    lora.set_adapter("one")
    one.refresh()
    assert one.num_chunks == 0
    ids = prompt_of(one, HEAD, TEXTS[1:], QUESTION)
    assert one.prefill(ids).stats.mode == "full"
    lora.set_adapter("two")
    assert two.prefill(ids).stats.hits == 4


@pytest.mark.parametrize("change", ["disable", "merge", "train", "add", "inject"])
def test_the_watch_sees(change: str, lora: Any) -> None:
    if change == "inject":
        model = random_model()
        watch = WeightsWatch(model)
        two_adapters(model)
        assert watch.changed()
        return
    watch = WeightsWatch(bare_model(lora))
    assert not watch.changed()
    if change == "disable":
        with lora.disable_adapter():
            assert watch.changed()
        assert not watch.changed()
        return
    if change == "merge":
        lora.merge_adapter()
    elif change == "add":
        lora.add_adapter("three", peft.LoraConfig(target_modules=["v_proj"]))
    else:
        with torch.no_grad():
            next(lora.parameters()).add_(0.1)
    assert watch.changed()


def test_virtual_tokens_are_refused_by_name() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING"):
        engine_of(peft.get_peft_model(random_model(), config), on_unsupported="full")
