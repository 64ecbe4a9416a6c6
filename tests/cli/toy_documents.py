"""A directory of short documents, a tiny model, and the command line; a plugin, like the toy collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import random_model, small_tokenizer
from toy_texts import BREAD, TEXTS, pdf_of
from typer.testing import CliRunner, Result

from rag_blend.cli import app


@pytest.fixture  # asked for by name: in a plugin, autouse would be for every module of the suite
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine make a tiny model ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-model"
    random_model(max_position_embeddings=4096).save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    directory = tmp_path / "documents"
    directory.mkdir()
    for name, text in TEXTS.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "bread.pdf").write_bytes(pdf_of(BREAD))
    return directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `rag-blend` in a directory of its own, without a hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda *arguments, **more: CliRunner().invoke(app, list(map(str, arguments)), **more)
