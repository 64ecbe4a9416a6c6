"""Two-layer random models of every supported family and a small tokenizer, all made in memory."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rag_blend import BlendEngine
from rag_blend.control import Controller

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What a family's configuration says beyond the sizes in `random_model`. These few stand for all where that is enough.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None, "head_dim": 16},
}
ALL_FAMILIES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "mixtral": {"num_local_experts": 4, "head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {  # its queries grow with their position
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"num_key_value_heads": 4},  # MHA, q, k and v in one projection
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},  # MQA
    "granite": {
        "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 4.0,
    },
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "cohere": {"use_qk_norm": True},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {},
    "falcon": {"multi_query": True, "parallel_attn": True},
    "falcon_new": {"model_type": "falcon", "num_kv_heads": 2, "new_decoder_architecture": True},
    "helium": {"head_dim": 16},
    "gpt_neox": {"num_key_value_heads": None},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
}  # fmt: skip
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
    },
}  # fmt: skip
# Families that the self-test refuses, or that do not exist, before these versions of transformers.
SINCE = {"gemma3_text": "5.0", "ministral3": "5.0", "olmo3": "5.0", "stablelm": "5.3"}
_VERSION = Version(transformers.__version__)


def known_families(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that this version of transformers has, in a way that can be blended."""
    return {name: changes for name, changes in families.items() if Version(SINCE.get(name, "0")) <= _VERSION}


ALL_FAMILIES = known_families(ALL_FAMILIES)
_OWN_ROPES = {  # others their configurations refuse, or have another meaning for
    "hunyuan_v1_dense": ["default", "linear", "llama3", "yarn", "longrope"],
    "ministral3": ["default"],
    "phi3": ["default", "longrope"],
}
if Version("5.0") > _VERSION:  # its configuration wants older names for the others
    _OWN_ROPES |= {"olmo2": ["default"]}
FAMILY_ROPES = [(family, rope) for family in ALL_FAMILIES for rope in _OWN_ROPES.get(family, ROPES)]
WORDS = (
    "the a of and river mountain valley engine water glass light stone bridge market town north south winter summer "
    "carries builds measures keeps opens closes between under over with without many few old new red green blue"
).split()
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def random_model(family: str = "llama", rope: str = "default", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A two-layer float32 model with sharp attention, so that a wrong mask or position shows in the logits.

    Norms have random weights, too: with ones, one between RoPE and the cache would not show.
    """
    sizes: dict[str, Any] = {
        "model_type": family, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **ALL_FAMILIES.get(family, {}), **changes,
    }  # fmt: skip
    model_type = sizes.pop("model_type")
    if ROPES[rope] is not None:
        plain = AutoConfig.for_model(model_type, **sizes)
        parameters = _shortened(ROPES[rope], _rotary_dim(plain) // 2)
        if hasattr(plain, "rope_parameters"):
            sizes["rope_parameters"] = parameters
        else:  # before transformers 5
            sizes["rope_theta"] = parameters.pop("rope_theta")
            if model_type == "phi3":  # which has names of its own
                sizes["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
                parameters = {"type": rope, **{name: parameters[name] for name in ("short_factor", "long_factor")}}
            sizes["rope_scaling"] = parameters
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))  # to ones, or to Gemma's zeros
            else:
                parameter.normal_(0.0, 0.15)
    return model


def _rotary_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or vars(config)
    return int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))


def _shortened(rope: dict[str, Any] | None, num_frequencies: int) -> dict[str, Any]:
    """A RoPE with one factor per frequency, where it has such."""
    return {name: value[:num_frequencies] if isinstance(value, list) else value for name, value in (rope or {}).items()}


def small_tokenizer(adds_bos: bool = False, splits_digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 512 tokens, with a chat template; with `adds_bos` it puts BOS in front.

    With `splits_digits`, as SmolLM2's, two line breaks are one token in front of a digit, and two in front of a letter.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [" ".join(WORDS), " ".join(reversed(WORDS))] * 4
    if splits_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        texts.append("the\n\n7" * 50)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
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


@pytest.fixture(autouse=True)
def _whatever_it_takes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such small models compute prompts faster than they blend: nothing is declined, unless a test is about that."""
    if "declines" not in request.keywords:
        monkeypatch.setattr("rag_blend.engine.timed_prefills", lambda adapter: [])
        monkeypatch.setattr(Controller, "best", lambda self, plan, places, work_of: plan)
        monkeypatch.setattr(Controller, "spare_rows", lambda self, plan, places, work_of: 0)


@pytest.fixture
def ttfts(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Pretends that full prefill and blends take so many seconds: `ttfts(full_s, blend_s)`."""
    prefill = BlendEngine.prefill

    def take(full_s: float, blend_s: float) -> None:
        def pretending(engine: BlendEngine, *args: Any, **kwargs: Any) -> Any:
            done = prefill(engine, *args, **kwargs)
            seconds = full_s if done.stats.mode == "full" else blend_s
            return replace(done, stats=replace(done.stats, ttft_s=seconds))

        monkeypatch.setattr(BlendEngine, "prefill", pretending)

    return take


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
