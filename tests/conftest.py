"""Two-layer random models of every supported family and a small tokenizer, all made in memory."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rag_blend import BlendEngine

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}  # fmt: skip
WORDS = (
    "the a of and river mountain valley engine water glass light stone bridge market town north south winter summer "
    "carries builds measures keeps opens closes between under over with without many few old new red green blue"
).split()
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def random_model(family: str = "llama", rope: str = "default", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A two-layer float32 model with sharp attention, so that a wrong mask or position shows in the logits."""
    config_class, model_class, extra = FAMILIES[family]
    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if ROPES[rope] is not None:
        sizes["rope_parameters"] = ROPES[rope]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **extra, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.15)
    return model


def small_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 512 tokens, with a chat template; with `adds_bos` it puts BOS in front."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([" ".join(WORDS), " ".join(reversed(WORDS))] * 4, trainer)
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


def random_text(seed: int, num_words: int = 60) -> str:
    """Words in random order; different seeds give different text."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(WORDS), (num_words,), generator=generator).tolist()
    return " ".join(WORDS[i] for i in picks)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_tokenizer()


@pytest.fixture
def make_engine(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., BlendEngine]]:
    """Makes engines on random models: `make_engine(family="qwen3", storage=..., ...)`; closes them at the end."""
    engines: list[BlendEngine] = []

    def make(
        family: str = "llama", rope: str = "default", model: PreTrainedModel | None = None, **options: Any
    ) -> BlendEngine:
        options = {
            "storage": None,
            "prime": "none",
            "kv_dtype": torch.float32,
            "prefix_cache_bytes": 0,  # a prompt asked twice is computed twice; tests/test_prefixes.py switches it on
            "tokenizer": tokenizer,
            **options,
        }
        engine = BlendEngine(model or random_model(family, rope), options.pop("tokenizer"), **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def texts() -> list[str]:
    return [random_text(seed) for seed in range(6)]
