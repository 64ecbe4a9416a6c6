"""One model, one store, one vLLM and one Hugging Face engine for all tests that need both: a pytest plug-in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from vllm_server import HEAD, SECRET, Server

from rag_blend import BlendEngine

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines in processes of their own come first: here, vLLM keeps the environment that its first engine saw."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(hidden_size=128, num_hidden_layers=4).save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="session")
def make_hf(model_dir: Path, storage: Path) -> Iterator[Callable[..., BlendEngine]]:
    """Engines on the model and the store that vLLM has."""
    engines = []

    def make(**options: Any) -> BlendEngine:
        options = {"prime": "none", "kv_dtype": torch.float32, "prefix_cache_bytes": 0, **options}
        place = str(options.pop("storage", storage))
        engines.append(BlendEngine.from_pretrained(model_dir, place, recompute_ratio=None, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def hf(make_hf: Callable[..., BlendEngine]) -> BlendEngine:
    engine = make_hf(reuse_when="possible")
    engine.ingest([random_text(seed) for seed in range(8)], head=HEAD, progress=False)
    return engine


@pytest.fixture(scope="session")
def server(model_dir: Path, storage: Path, hf: BlendEngine) -> Server:
    os.environ["RAG_BLEND_SECRET"] = SECRET
    return Server(model_dir, storage)


@pytest.fixture
def clean(server: Server) -> Server:
    """The server, without anything in its prefix cache."""
    server.forget_blocks()
    return server


@pytest.fixture(scope="session")
def corpus(hf: BlendEngine) -> list[str]:
    """Ingested ones."""
    return [random_text(seed) for seed in range(8)]
