"""Arguments of `from_pretrained` mean what they mean in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import random_model, small_tokenizer

from rag_blend import BlendEngine
from rag_blend.loading import load


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model().to(torch.bfloat16).save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return path


def test_on_a_cpu_models_compute_in_float32_with_sdpa(directory: Path) -> None:
    model, _ = load(directory, device="cpu")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("asked", [torch.bfloat16, "bfloat16", "auto"])
def test_a_dtype_has_two_names(name: str, asked: object, directory: Path) -> None:
    assert load(directory, device="cpu", model_kwargs={name: asked})[0].dtype == torch.bfloat16


def test_eager_attention_blends(directory: Path) -> None:
    with BlendEngine.from_pretrained(
        directory, None, device="cpu", model_kwargs={"attn_implementation": "eager"}
    ) as engine:
        assert engine.mode == "blend" and engine._model.config._attn_implementation == "eager"


def test_a_device_map_decides_alone(directory: Path) -> None:
    with BlendEngine.from_pretrained(directory, None, device="cuda:7", model_kwargs={"device_map": "cpu"}) as engine:
        assert engine.mode == "blend" and engine._model.device.type == "cpu"


def test_code_of_a_model_s_own_is_not_run_unasked(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config["model_type"] = "own"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise RuntimeError('it ran')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(tmp_path, device="cpu")
    with pytest.raises(RuntimeError, match="it ran"):
        load(tmp_path, device="cpu", model_kwargs={"trust_remote_code": True})
