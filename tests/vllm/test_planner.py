"""What of a prompt is stored, by the rules of the engine that ingested it. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import random_text, small_tokenizer
from vllm_server import HEAD, prompt_of

from rag_blend import BlendEngine
from rag_blend.prompt import prompt_ids
from rag_blend.storage import StorageBackend, open_storage
from rag_blend.vllm.options import Options
from rag_blend.vllm.planner import PromptPlanner
from rag_blend.vllm.recipe import Recipe

TEXTS = [random_text(seed) for seed in range(3)]
IDS = prompt_ids(small_tokenizer(), prompt_of(TEXTS))
MakePlanner = Callable[..., PromptPlanner]


@pytest.fixture
def ingesting(make_engine: Callable[..., BlendEngine], tmp_path: Path) -> Callable[..., BlendEngine]:
    """An engine made with these options that has ingested `TEXTS`."""

    def ingest(**options: Any) -> BlendEngine:
        engine = make_engine(storage=tmp_path, **options)
        engine.ingest(TEXTS, head=HEAD, progress=False)
        return engine

    return ingest


@pytest.fixture
def make_planner(tmp_path: Path) -> Iterator[MakePlanner]:
    """A planner for an engine's chunks, made with these options of the connector."""
    planners = []

    def make(engine: BlendEngine, backend: StorageBackend | None = None, **options: Any) -> PromptPlanner:
        given = Options(str(tmp_path), **{"prime": "none", **options})
        backend = backend or open_storage(tmp_path)
        planners.append(PromptPlanner(backend, engine.fingerprint, torch.float32, small_tokenizer(), given))
        return planners[-1]

    yield make
    for planner in planners:
        planner.close()


def keys_of(planner: PromptPlanner) -> frozenset[str]:
    plan = planner.submit(IDS, Recipe()).result()
    return frozenset() if plan is None else plan.layout.keys


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_is_exact_and_what_is_blended_is_as_in_the_engine(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner, codec: str
) -> None:
    engine = ingesting(codec=codec)
    plan = make_planner(engine).submit(IDS, Recipe(selector="none")).result()
    stats = engine.prefill(IDS.tolist(), selector="none").stats
    assert plan.layout.exact_tokens == stats.prefix_tokens and len(plan.layout.reusable) == stats.reused_tokens
    behind_head = len(prompt_ids(small_tokenizer(), HEAD)) + 16
    assert (plan.layout.exact_tokens > behind_head) == (codec == "raw"), "whether the first chunk is exact"


def test_nothing_is_exact_when_everything_is_recomputed(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner
) -> None:
    plan = make_planner(ingesting()).submit(IDS, Recipe("default", "heads", 1.0)).result()
    assert plan.layout.exact_tokens == 0 and np.array_equal(plan.rows, np.arange(len(plan)))


def test_only_chunks_primed_as_the_options_say_are_used(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner
) -> None:
    engine = ingesting(prime="sample", prime_tokens=32, exact_first=False)
    assert len(keys_of(make_planner(engine, prime="sample", prime_tokens=32))) == 4
    assert len(keys_of(make_planner(engine))) == 1, "the head is not primed"


@pytest.mark.parametrize("exact_first", [True, False])
def test_unprimed_copies_are_used_as_in_the_engine(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner, exact_first: bool
) -> None:
    priming = {"prime": "sample", "prime_tokens": 32, "exact_first": exact_first}
    engine = ingesting(**priming)
    plan = make_planner(engine, **priming).submit(IDS, Recipe(selector="none")).result()
    stats = engine.prefill(IDS.tolist(), selector="none").stats
    assert plan.layout.exact_tokens == stats.prefix_tokens and len(plan.layout.reusable) == stats.reused_tokens
    behind_head = len(prompt_ids(small_tokenizer(), HEAD)) + 16
    assert (plan.layout.exact_tokens > behind_head) == exact_first


def test_a_chunk_that_cannot_be_had_now_is_used_later(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner, tmp_path: Path
) -> None:
    backend = open_storage(tmp_path)
    planner = make_planner(ingesting(), backend)
    open_entry, silent = backend.open, next(iter(backend.keys()))
    backend.open = Mock(side_effect=lambda key: _refused() if key == silent else open_entry(key))  # type: ignore[method-assign]
    assert len(keys_of(planner)) == 3
    backend.open = open_entry  # type: ignore[method-assign]
    assert len(keys_of(planner)) == 4


def test_a_search_that_fails_is_told_and_holds_up_no_other_tenant(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ingesting()
    planner = make_planner(engine, namespaces=("broken", "default"), refresh_s=0.0)
    planner._tenants["broken"].refresh = Mock(side_effect=RuntimeError("planted"))
    new = random_text(9)
    engine.ingest([new], head=HEAD, progress=False)
    planner.submit(IDS, Recipe()).result()  # starts the search
    planner._scans.submit(int).result()
    assert "namespace 'broken' was not looked through" in caplog.text and "planted" in caplog.text
    plan = planner.submit(prompt_ids(small_tokenizer(), prompt_of([new])), Recipe()).result()
    assert len(plan.layout.keys) == 2


def test_closing_releases_the_store(
    ingesting: Callable[..., BlendEngine], make_planner: MakePlanner, tmp_path: Path
) -> None:
    backend = open_storage(tmp_path)
    backend.close = Mock(wraps=backend.close)  # type: ignore[method-assign]
    make_planner(ingesting(), backend).close()
    backend.close.assert_called_once_with()


def _refused() -> None:
    raise OSError("planted")
