"""docs/cost.md says what an entry really takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_text
from models.kv_sizes import CHUNK_TOKENS, CODECS, MODELS, PAGE, Sizes, bytes_per_token, with_table

from rag_blend import BlendEngine


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"| {name} |" in page for name in MODELS)
    assert with_table(page) == page


def test_raw_is_the_formula() -> None:
    for layers, kv_heads, head_dim in MODELS.values():
        assert bytes_per_token(Sizes(layers, kv_heads, head_dim), "raw") == 2 * layers * kv_heads * head_dim * 2


@pytest.mark.parametrize("codec", CODECS)
def test_stored_entries_are_so_large(make_engine: Callable[..., BlendEngine], tmp_path: Path, codec: str) -> None:
    engine = make_engine("qwen3", storage=tmp_path, kv_dtype=None, codec=codec)
    ids = engine.tokenizer(random_text(1, 900))["input_ids"][:CHUNK_TOKENS]
    report = engine.ingest([engine.tokenizer.decode(ids)], progress=False)
    assert report.tokens == CHUNK_TOKENS
    (entry,) = tmp_path.rglob("*.safetensors")
    config = engine._model.config
    sizes = Sizes(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    beside = entry.stat().st_size - CHUNK_TOKENS * bytes_per_token(sizes, codec)
    assert 0 < beside < 8 * CHUNK_TOKENS  # token ids, staleness, checksums
