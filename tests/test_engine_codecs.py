"""Engines that write caches down in different ways, and read each other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_engine_storage import HEAD, entries, prompt_with

from rag_blend import BlendEngine
from rag_blend.codecs import codec_names, codec_of

MakeEngine = Callable[..., BlendEngine]


@pytest.mark.parametrize("codec", codec_names())
def test_an_engine_reads_what_another_wrote(
    codec: str, make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    options = {"storage": tmp_path, "kv_dtype": torch.float16, "selector": "none"}
    make_engine(codec=codec, **options).ingest(texts[:3], progress=False)
    engine = make_engine(**options)
    assert engine.num_chunks == 3
    assert engine.ingest(texts, progress=False).chunks == 3  # the others are good enough
    prefill = engine.prefill(prompt_with(*texts))
    assert prefill.stats.hits == 6
    plain = make_engine(selector="none", kv_dtype=torch.float16)
    plain.ingest(texts, progress=False)
    expected = plain.prefill(prompt_with(*texts)).logits
    error = float((prefill.logits - expected).abs().max() / expected.abs().max())
    assert error <= {"raw": 0.0, "zstd": 0.0, "int8": 0.05, "int4": 0.5}[codec]


@pytest.mark.parametrize("codec", codec_names())
def test_only_what_came_back_bit_for_bit_counts_as_exact(
    codec: str, make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    """Rows of a lossy codec are an approximation: not a prefix, and not for the prompts that come after."""
    engine = make_engine(storage=tmp_path, codec=codec, prefix_cache_bytes=1 << 24)
    engine.ingest(texts[:1], head=HEAD, progress=False)
    stats = engine.prefill(prompt_with(texts[0]), selector="none").stats
    head = len(engine.tokenizer(HEAD)["input_ids"])
    assert stats.hits == 2
    if codec_of(codec).lossless:
        assert stats.prefix_tokens > head and stats.mode == "prefix" and len(engine._prefixes) == 1
    else:
        assert stats.prefix_tokens == head and stats.reused_tokens > 0 and len(engine._prefixes) == 0


def test_a_lossy_codec_takes_less_room(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    sizes = {}
    for codec in ("raw", "int8", "int4"):
        make_engine(storage=tmp_path / codec, codec=codec, kv_dtype=torch.float16).ingest(texts, progress=False)
        sizes[codec] = sum(path.stat().st_size for path in entries(tmp_path / codec))
    assert sizes["int4"] < sizes["int8"] < sizes["raw"]


def test_an_unknown_codec_is_refused_by_name(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="int7"):
        make_engine(codec="int7")
