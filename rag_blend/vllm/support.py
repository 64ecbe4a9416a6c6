"""What cannot be blended in vLLM is refused by name when the server starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from rag_blend.errors import UnsupportedModelError
from rag_blend.info import rope_types_of

WORKER = "rag_blend.vllm.worker.BlendWorker"
CONNECTOR_MODULE = "rag_blend.vllm.connector"
_ROPES = {"default", "linear", "llama3", "yarn"}  # with the others a key's angle depends on the prompt's length


def refuse_unsupported(config: VllmConfig) -> None:
    """Check a server's options, before it has loaded anything.

    Raises:
        UnsupportedModelError: Something cannot be blended; all of it is named.
        ValueError: An option must be set otherwise.
    """
    if reasons := list(_reasons(config)):
        raise UnsupportedModelError(f"rag_blend cannot blend in this server: {'; '.join(reasons)}.", servable=False)
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            'a chunk that cannot be read must be recomputed: set "kv_load_failure_policy": "recompute" in '
            "kv_transfer_config"
        )


def require_worker(config: VllmConfig) -> None:
    """Check that the connector will meet the model.

    Raises:
        ValueError: vLLM was started with another worker class.
    """
    if config.parallel_config.worker_cls != WORKER:
        raise ValueError(f"start vLLM with --worker-cls {WORKER}, its own workers show the model to no connector")


def require_connector(config: VllmConfig) -> None:
    """Check that there is a connector, which knows where chunks are.

    Raises:
        ValueError: vLLM was started with another one or none.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector_module_path != CONNECTOR_MODULE:
        raise ValueError(f"start vLLM with a kv_transfer_config that names {CONNECTOR_MODULE}, see docs/vllm.md")


def refuse_unsupported_cache(config: KVCacheConfig) -> None:
    """Check the layout of vLLM's cache, once it is known.

    Raises:
        UnsupportedModelError: It is not one group of layers with full attention.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    kinds = sorted({type(spec).__name__ for spec in specs})
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        found = f"its layers are cached in {len(specs)} groups of {', '.join(kinds)}"
        raise UnsupportedModelError(f"rag_blend needs full attention in every layer: {found}.", servable=False)
    if specs[0].sliding_window is not None or specs[0].attention_chunk_size is not None:
        raise UnsupportedModelError("rag_blend needs full attention: this model's slides.", servable=False)


def _reasons(config: VllmConfig) -> Iterator[str]:
    yield from _of_the_model(config.model_config)
    parallel = config.parallel_config
    if config.lora_config is not None:
        yield "LoRA (--enable-lora): stored chunks are those of the bare model"
    if config.speculative_config is not None:
        yield "speculative decoding"
    if config.cache_config.cache_dtype not in {"auto", str(config.model_config.dtype).removeprefix("torch.")}:
        yield f"a KV cache of another dtype than the model's (--kv-cache-dtype {config.cache_config.cache_dtype})"
    if config.load_config.load_format == "dummy":
        yield "made-up weights (--load-format dummy)"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism"
    if parallel.data_parallel_size > 1:
        yield "data parallelism (start several servers on one store instead)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism"
    if parallel.enable_dbo:
        yield "dual batch overlap"
    if config.use_v2_model_runner:
        yield "vLLM's V2 model runner (start with VLLM_USE_V2_MODEL_RUNNER=0)"


def _of_the_model(model: Any) -> Iterator[str]:
    if model.runner_type != "generate":
        yield f"a model that does not generate (runner {model.runner_type})"
    if model.is_encoder_decoder:
        yield "encoder-decoders"
    if model.is_multimodal_model or model.uses_mrope:
        yield "multimodal models"
    if model.use_mla:
        yield "multi-head latent attention (MLA)"
    if model.is_hybrid or model.is_attention_free:
        yield "state space and linear attention layers (SSM)"
    if model.quantization is not None:
        yield f"quantised weights ({model.quantization}): the engine that ingests computes otherwise"
    if model.hf_overrides:
        yield "--hf-overrides: stored chunks are those of the checkpoint as it is"
    if model.enable_prompt_embeds:
        yield "prompts that are embeddings (--enable-prompt-embeds)"
    if ropes := sorted(set(rope_types_of(model.hf_config)) - _ROPES):
        yield f"RoPE of type {', '.join(ropes)}"
