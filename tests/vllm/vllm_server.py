"""A vLLM engine in this process, asked as its OpenAI server asks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rag_blend import BlendEngine
from rag_blend.chunk import LayerKV
from rag_blend.codecs.raw import RawCodec
from rag_blend.entry import EntryHeader, read_header, read_layer
from rag_blend.generation import GenerationStats
from rag_blend.storage.disk import DiskBackend
from rag_blend.vllm import request_fields

SECRET = "a secret of the tests"
HEAD = "the mountain carries many old bridges between the town and the river, winter market glass\n\n"
CLOSE = 1e-4
WORKER = "rag_blend.vllm.worker.BlendWorker"


def transfer_config(storage: Path | str, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "rag_blend.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "storage": str(storage), "prime": "none", "kv_dtype": "float32", "refresh_s": 0, **options,
        },
    }  # fmt: skip


def prompt_of(texts: Sequence[str], question: str = "old new red green?") -> str:
    return HEAD + "\n\n".join(texts) + "\n\n" + question


class Answer(NamedTuple):
    """What vLLM says."""

    token_ids: list[int]
    logprobs: dict[int, float]  # of the first token, the best 20
    cached: int
    report: dict[str, Any] | None

    def far_from(self, logits: torch.Tensor) -> float:
        """Largest difference to log probabilities that transformers gives."""
        reference = torch.log_softmax(logits.flatten().float(), -1)
        return max(abs(float(reference[token]) - value) for token, value in self.logprobs.items())


class Server:
    """Small enough that prefills come in chunks, blends in bursts, and 16 prompts do not fit.

    Args:
        model: Directory of the model.
        storage: Directory or URL of the caches.
        ranks: Over how many processes the model is divided.
        **options: More of the connector's.
    """

    def __init__(self, model: Path, storage: Path | str, ranks: int = 1, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=1024,
            enforce_eager=True,
            block_size=32,
            max_num_batched_tokens=96,
            max_num_seqs=16,
            num_gpu_blocks_override=64,
            tensor_parallel_size=ranks,
            worker_cls=WORKER,
            kv_transfer_config=transfer_config(storage, namespaces=["default", "other"], max_rows=40, **options),
        )

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, requests: Sequence[tuple[list[int], dict[str, Any] | None]], num_tokens: int = 4) -> list[Answer]:
        """Answer requests together, each with its own fields or none."""
        from vllm import SamplingParams

        prompts, params = [], []
        for token_ids, fields in requests:
            fields = fields or {}
            extra = {"kv_transfer_params": fields["kv_transfer_params"]} if "kv_transfer_params" in fields else None
            salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
            prompts.append({"prompt_token_ids": token_ids, **salt})
            params.append(SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=20, extra_args=extra))
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            Answer(
                token_ids=list(output.outputs[0].token_ids),
                logprobs={token: said.logprob for token, said in output.outputs[0].logprobs[0].items()},
                cached=output.num_cached_tokens,
                report=output.kv_transfer_params,
            )
            for output in outputs
        ]

    def ask_one(self, token_ids: list[int], fields: dict[str, Any] | None = None, num_tokens: int = 4) -> Answer:
        return self.ask([(token_ids, fields)], num_tokens)[0]

    def forget_blocks(self) -> None:
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the processes of an engine that has its own."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def server_apart(model_dir: Path, storage: Path | str, **options: Any) -> Iterator[Server]:
    """A server whose scheduler and workers run in processes of their own, as in production."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAG_BLEND_SECRET", SECRET)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        server = Server(model_dir, storage, **options)
        try:
            yield server
        finally:
            server.close()


def counts_of(stats: GenerationStats) -> dict[str, int]:
    """What vLLM reports of the same blend: there, an exact prefix is reused like all else."""
    reused = stats.reused_tokens + stats.prefix_tokens
    return {"reused_tokens": reused, "recomputed_tokens": stats.recomputed_tokens}


def fields_of(selector: str = "heads", ratio: float | None = None, namespace: str = "default") -> dict[str, Any]:
    return request_fields(namespace, selector, ratio, SECRET)


def ids_of(hf: BlendEngine, prompt: str) -> list[int]:
    return list(hf.tokenizer(prompt)["input_ids"])


def full(hf: BlendEngine, ids: list[int]) -> torch.Tensor:
    return hf.prefill(ids, reuse=False).logits


def refreshed(server: Server, ids: list[int]) -> None:
    """Let the server notice what was ingested since; `refresh_s` is 0, and a look-up starts the search."""
    server.ask_one(ids, fields_of())
    server.scheduler.connector._scheduler._planner._scans.submit(int).result()
    server.forget_blocks()


def keys_in(directory: Path) -> set[str]:
    return set(DiskBackend(directory).keys())


def assert_stores_alike(left: Path, right: Path, tolerance: float) -> None:
    """Two directories hold the same chunks and heads, computed by the same model."""
    keys = keys_in(left)
    assert keys == keys_in(right) and keys
    assert set(DiskBackend(left).records()) == set(DiskBackend(right).records())
    for key in keys:
        (one, layers), (other, references) = (_entry(directory, key) for directory in (left, right))
        assert (one.origin, one.shape, one.dtype) == (other.origin, other.shape, other.dtype)
        assert (one.staleness is None) == (other.staleness is None)
        if one.staleness is not None:
            np.testing.assert_allclose(one.staleness, other.staleness, rtol=0.01, atol=1e-4)
        for layer, reference in zip(layers, references, strict=True):
            torch.testing.assert_close(layer.keys, reference.keys, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(layer.values, reference.values, atol=tolerance, rtol=tolerance)


def _entry(directory: Path, key: str) -> tuple[EntryHeader, list[LayerKV]]:
    with DiskBackend(directory).open(key) as reader:
        header = read_header(reader, key, RawCodec())
        return header, [read_layer(reader, header, layer_idx) for layer_idx in range(len(header.offsets))]
