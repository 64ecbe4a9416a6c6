"""The servers that are compared, and what they are started with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_blend.vllm import request_fields
from rag_blend.vllm.options import SECRET_VARIABLE

REFERENCE = "vllm"
SERVED_MODEL = "model"  # its name in requests


@dataclass(frozen=True)
class Contender:
    """One way to serve.

    Attributes:
        name: In results, and of its log.
        options: Of its vLLM, besides those that all get.
        fields: Of each request, besides those that all have.
    """

    name: str
    options: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


def contenders(storage: Path) -> list[Contender]:
    """All of them; `storage` is the directory of the one that reuses stored chunks."""
    connector = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "rag_blend.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # Nothing is ingested meanwhile; a search would compute while another server is timed.
        "kv_connector_extra_config": {"storage": str(storage), "refresh_s": 86_400},
    }
    ours = ("--worker-cls", "rag_blend.vllm.worker.BlendWorker", "--kv-transfer-config", json.dumps(connector))
    return [
        Contender(REFERENCE, ("--no-enable-prefix-caching",)),
        Contender("vllm-prefix-caching", ("--enable-prefix-caching",)),
        Contender("rag_blend-heads", ("--enable-prefix-caching", *ours), request_fields(selector="heads")),
    ]


def command_of(
    contender: Contender, python: str, model: Path, port: int, window: int, clients: int, dtype: str
) -> list[str]:
    """What starts a server.

    Args:
        contender: Which.
        python: The interpreter of an environment with vLLM.
        model: A Hugging Face directory.
        port: Of 127.0.0.1.
        window: Tokens of a prompt and its answer, at most.
        clients: Requests at once, at most.
        dtype: What it computes in.
    """
    # Eager: on a CPU, compiling takes minutes. Not `vllm serve`: the CPU build has a distribution of another name.
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", SERVED_MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", str(window),
        "--max-num-seqs", str(clients), "--enforce-eager", "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log", "--disable-log-stats", *contender.options,
    ]  # fmt: skip


def variables(threads: int, kv_gib: int, openmp: Path | None) -> dict[str, str]:
    """The environment variables of every server.

    Args:
        threads: To compute with.
        kv_gib: GiB for its KV cache.
        openmp: An OpenMP library that is loaded in place of the one that torch brings.
    """
    own = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # one that waits must not take cores from the one that is timed
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all are confined to the same cores already
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if openmp is not None:
        own["LD_PRELOAD"] = str(openmp)
    # The environment's secret is none of this benchmark's business.
    return {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE} | own


def intel_openmp(python: Path) -> Path | None:
    """Intel's OpenMP library as vLLM's CPU build installs it beside its interpreter, if it is there."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    return library if library.is_file() else None
