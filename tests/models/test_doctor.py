"""What `rag-blend doctor` says is what is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import random_model, random_text, small_tokenizer
from exactness import HEAD
from transformers import T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from rag_blend import BlendEngine
from rag_blend.calibration import Verdict
from rag_blend.cli.doctor import doctor
from rag_blend.doctor import examine
from rag_blend.storage.memory import MemoryBackend

VERDICT = Verdict("heads", 0.1, True, 0.02, 0.97, 0.01, 0.99, 0.1, 3.0, 24, "2026-01-01")


def report_of(family: str, rope: str = "default", storage: Any = None, **changes: Any) -> Any:
    return examine(random_model(family, rope, **changes), small_tokenizer(), storage, prime="none")


def test_a_model_that_blends() -> None:
    report = report_of("smollm3", "yarn")
    assert (report.mode, report.reason, report.self_test) == ("blend", None, "passed")
    assert (report.rope, report.layers, report.layers_without_rope) == (("yarn",), 2, 1)
    assert (report.kv_heads, report.head_dim, report.kv_bytes_per_token) == (2, 16, 2 * 2 * 2 * 16 * 2)
    assert report.sees_attention and report.context_window == 1024
    assert report.policy == "anchor (default)"


def test_the_estimate_is_what_the_disk_holds(tmp_path: Path) -> None:
    with BlendEngine(random_model(), small_tokenizer(), tmp_path, prime="none") as engine:
        tokens = engine.ingest([random_text(1, 400)], head=HEAD, progress=False).tokens
    held = max(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    estimate = report_of("llama").gib_per_million_tokens * 2**30 / 1e6 * tokens
    assert estimate < held < 1.1 * estimate


@pytest.mark.parametrize(
    ("family", "mode", "why"),
    [("gpt2", "prefix", "no rotary"), ("mamba", "full", "MambaForCausalLM"), ("deepseek_v3", "prefix", "self-test")],
)
def test_a_model_that_does_not(family: str, mode: str, why: str) -> None:
    report = report_of(family, num_key_value_heads=4)
    assert report.mode == mode and why in report.reason
    assert report.kv_bytes_per_token is report.gib_per_million_tokens is None
    assert (report.self_test is not None) == (why == "self-test")


def test_a_model_that_must_be_calibrated_first() -> None:
    window, storage = {"sliding_window": 16}, MemoryBackend()
    report = report_of("mistral", storage=storage, **window)
    assert (report.mode, report.self_test, report.policy) == ("prefix", "passed", "full prefill (default)")
    assert report.reason.startswith("its attention slides over 16 tokens") and "rag-blend calibrate" in report.reason
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    options = {"prime": "none", "on_unsupported": "measured"}
    with BlendEngine(random_model("mistral", **window), small_tokenizer(), storage, **options) as engine:
        engine.adopt(VERDICT)
    report = report_of("mistral", storage=storage, **window)
    assert (report.mode, report.policy) == ("blend", "heads at 10% (calibrated)")


def test_a_model_that_cannot_be_served() -> None:
    config = T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    report = examine(T5ForConditionalGeneration(config), small_tokenizer())
    assert report.mode == "refused" and "encoder-decoder" in report.reason and report.policy is None


def test_falcon_s_attention_cannot_be_seen() -> None:
    assert not report_of("falcon").sees_attention


@pytest.fixture
def run(tmp_path: Path) -> Any:
    random_model().save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command()(doctor)
    return lambda *arguments: CliRunner().invoke(app, [str(tmp_path / "model"), *arguments])


def test_the_command_prints_a_table(run: Any) -> None:
    result = run()
    assert result.exit_code == 0
    for words in ("blend: stored chunks", "self-test          passed", "LlamaForCausalLM (llama)", "0.2 GiB on disk"):
        assert words in result.output


def test_the_command_knows_a_store_s_verdict(run: Any, tmp_path: Path) -> None:
    with BlendEngine.from_pretrained(tmp_path / "model", tmp_path / "kv", device="cpu") as engine:
        engine.adopt(VERDICT)
    found = json.loads(run("--json", "--storage", str(tmp_path / "kv")).output.splitlines()[-1])
    assert found["policy"] == "heads at 10% (calibrated)" and found["mode"] == "blend"
    assert json.loads(run("--json").output.splitlines()[-1])["policy"] == "anchor (default)"


def test_mistakes_are_told_in_a_line(run: Any, tmp_path: Path) -> None:
    result = run("--storage", str(tmp_path / "nowhere"))
    assert result.exit_code == 2 and "there is no store" in result.output
    assert not (tmp_path / "nowhere").exists()
