"""Arguments of `from_pretrained` mean what they mean in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import random_model, small_tokenizer
from transformers import AutoConfig

from rag_blend import BlendEngine, UnsupportedModelError
from rag_blend.loading import load


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model().to(torch.bfloat16).save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False}, raising=False)


@pytest.fixture
def cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": True}, raising=False)


def test_on_a_cpu_models_compute_in_float32_with_sdpa(directory: Path, plain_cpu: None) -> None:
    model, _ = load(directory, device="cpu")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "sdpa"


def test_a_cpu_that_multiplies_bfloat16_computes_checkpoints_in_it_that_are(
    directory: Path, cpu_with_amx: None
) -> None:
    assert load(directory, device="cpu")[0].dtype == torch.bfloat16
    assert load(directory, device="cpu", dtype="float32")[0].dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_no_cpu_computes_other_checkpoints_in_less_than_they_hold(
    stored: torch.dtype, tmp_path: Path, cpu_with_amx: None
) -> None:
    random_model().to(stored).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu")[0].dtype == torch.float32


def test_torch_that_does_not_say_what_the_cpu_can_do_computes_in_float32(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert load(directory, device="cpu")[0].dtype == torch.float32


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


def test_attention_that_sdpa_cannot_express_is_eager(tmp_path: Path) -> None:
    random_model("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu")[0].config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("t5", "it is an encoder-decoder"),
        ("bart", "it is an encoder-decoder"),
        ("whisper", "it is an encoder-decoder"),
        ("qwen2_vl", "it takes other inputs than text"),
        ("vit", "no causal language model of this type"),
    ],
)
def test_other_tasks_are_refused_by_name_before_weights_are_read(model_type: str, why: str, tmp_path: Path) -> None:
    """There are neither weights nor a tokenizer here."""
    config = AutoConfig.for_model(model_type)
    config.architectures = ["ItsClass"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"^ItsClass \(model_type '{model_type}'\) .*{why}") as raised:
        BlendEngine.from_pretrained(tmp_path, None, on_unsupported="full")
    assert len(str(raised.value)) < 120
