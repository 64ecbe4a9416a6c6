"""A vLLM engine in this process, asked as its OpenAI server asks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rag_blend.vllm import request_fields

SECRET = "a secret of the tests"
HEAD = "the mountain carries many old bridges between the town and the river, winter market glass\n\n"
WORKER = "rag_blend.vllm.worker.BlendWorker"


def transfer_config(storage: Path, **options: Any) -> dict[str, Any]:
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
    """Small enough that prefills come in chunks, blends in bursts, and 16 prompts do not fit."""

    def __init__(self, model: Path, storage: Path) -> None:
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
            worker_cls=WORKER,
            kv_transfer_config=transfer_config(storage, namespaces=["default", "other"], max_rows=40),
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


def fields_of(selector: str = "heads", ratio: float | None = None, namespace: str = "default") -> dict[str, Any]:
    return request_fields(namespace, selector, ratio, SECRET)
