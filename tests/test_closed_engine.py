"""An engine that is used wrongly says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import random_model, random_text, small_tokenizer

from rag_blend import BlendEngine

USES: list[Callable[[BlendEngine, Any], object]] = [
    BlendEngine.generate,
    BlendEngine.prefill,
    BlendEngine.stream,
    lambda engine, prompt: engine.generate_batch([prompt]),
]


@pytest.fixture
def engine(tmp_path: Path) -> BlendEngine:
    return BlendEngine(random_model(), small_tokenizer(), tmp_path)


@pytest.mark.parametrize("use", USES)
def test_no_prompt(engine: BlendEngine, use: Callable[[BlendEngine, Any], object]) -> None:
    with engine, pytest.raises(TypeError, match="must be text or a list of token ids, not None"):
        use(engine, None)


OTHER_USES: list[Callable[[BlendEngine, Any], object]] = [
    lambda engine, text: engine.ingest([text]),
    lambda engine, text: engine.ingest_later([text]),
    lambda engine, text: engine.prefetch([text]),
    lambda engine, text: engine.forget([text]),
    lambda engine, _: engine.refresh(),
]


@pytest.mark.parametrize("use", [*USES, *OTHER_USES])
def test_a_closed_engine(engine: BlendEngine, use: Callable[[BlendEngine, Any], object]) -> None:
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed: make a new one"):
        use(engine, random_text(0))
    engine.close()  # again, which is none
