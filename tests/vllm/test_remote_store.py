"""A vLLM server in processes of its own, on a store that another machine could have: Redis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_text

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")
pytest.importorskip("redis")

from servers import redis_server
from vllm_server import CLOSE, HEAD, fields_of, full, ids_of, prompt_of, server_apart

from rag_blend import BlendEngine

pytest_plugins = ["serving_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TEXTS = [random_text(seed) for seed in range(3)]


def test_chunks_come_from_redis_until_it_stops(
    model_dir: Path, make_hf: Callable[..., BlendEngine], tmp_path: Path
) -> None:
    """The engine that ingested and vLLM share nothing but the server; without it, prompts are prefilled."""
    with redis_server(tmp_path) as redis:
        url = f"{redis.url}?deadline_s=10"
        engine = make_hf(storage=url, reuse_when="possible")
        engine.ingest(TEXTS, HEAD, progress=False)
        ids = ids_of(engine, prompt_of(TEXTS))
        reference = engine.prefill(ids, selector="heads")
        with server_apart(model_dir, url) as server:
            answer = server.ask_one(ids, fields_of())
            assert answer.far_from(reference.logits) < CLOSE
            said, stats = answer.report["rag_blend"], reference.stats
            assert said["reused_tokens"] == stats.reused_tokens + stats.prefix_tokens > 100
            server.forget_blocks()
            redis.stop()
            answer = server.ask_one(ids, fields_of())
            assert answer.report["rag_blend"]["reused_tokens"] == 0
            assert answer.far_from(full(engine, ids)) < CLOSE
