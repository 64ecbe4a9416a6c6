"""What cannot be blended in vLLM is refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import random_model, small_tokenizer
from transformers import PreTrainedModel

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm_server import WORKER, transfer_config

from rag_blend import UnsupportedModelError
from rag_blend.vllm.checkpoint import geometry_of
from rag_blend.vllm.support import refuse_unsupported, require_connector, require_worker

pytestmark = pytest.mark.vllm


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model(hidden_size=128), tmp_path_factory.mktemp("llama"))


def config_of(model: Path, **arguments: Any) -> Any:
    given = {"kv_transfer_config": transfer_config(model), "worker_cls": WORKER, "dtype": "float32", **arguments}
    return EngineArgs(model=str(model), max_model_len=512, **given).create_engine_config()


def test_a_plain_llama_is_served(llama: Path) -> None:
    config = config_of(llama)
    refuse_unsupported(config)
    require_worker(config)
    assert geometry_of(str(llama), config.model_config.dtype).num_layers == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"hf_overrides": {"rope_theta": 5000.0}}, "--hf-overrides"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    ],
)
def test_options_are_refused_by_name(llama: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        refuse_unsupported(config_of(llama, **arguments))


def test_failing_requests_instead_of_recomputing_is_refused(llama: Path) -> None:
    transfer = {**transfer_config(llama), "kv_load_failure_policy": "fail"}
    with pytest.raises(ValueError, match="recompute"):
        refuse_unsupported(config_of(llama, kv_transfer_config=transfer))


def test_vllms_own_worker_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"--worker-cls rag_blend\.vllm\.worker\.BlendWorker"):
        require_worker(config_of(llama, worker_cls="auto"))


@pytest.mark.parametrize("transfer", [None, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}])
def test_ingestion_needs_the_connector(llama: Path, transfer: dict[str, Any] | None) -> None:
    require_connector(config_of(llama))
    with pytest.raises(ValueError, match=r"names rag_blend\.vllm\.connector"):
        require_connector(config_of(llama, kv_transfer_config=transfer))


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    path = saved(random_model("mistral", sliding_window=64, hidden_size=128), tmp_path)
    with pytest.raises(UnsupportedModelError, match="slides over 64 tokens"):
        geometry_of(str(path), config_of(path).model_config.dtype)


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    path = saved(random_model("llama", "dynamic", hidden_size=128), tmp_path)
    with pytest.raises(UnsupportedModelError, match="RoPE of type dynamic"):
        refuse_unsupported(config_of(path))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (
            "deepseek_v3",
            {
                "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 2, "num_key_value_heads": 4,
            },
            "MLA",
        ),
        ("mamba2", {"num_heads": 8, "head_dim": 32, "hidden_size": 128, "n_groups": 1, "state_size": 16}, "SSM"),
    ],
)  # fmt: skip
def test_families_are_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any], named: str) -> None:
    path = saved(random_model(family, **{"hidden_size": 128, **changes}), tmp_path)
    with pytest.raises(UnsupportedModelError, match=named):
        refuse_unsupported(config_of(path))
