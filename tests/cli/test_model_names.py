"""`--model`: a directory, a hub id, or demo."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

pytest.importorskip("llama_index.readers.file")
pytest.importorskip("wordllama")

pytest_plugins = ["toy_documents"]
pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., Result]


@pytest.fixture
def unreachable_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 1, and nothing is cached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    template = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("unreachable_hub")
@pytest.mark.parametrize("command", ["estimate", "ingest"])
def test_a_hub_that_cannot_be_reached_is_told_at_once(run: Run, documents: Path, command: str) -> None:
    started = time.perf_counter()
    result = run(command, documents, "--model", "nobody/nothing")
    assert time.perf_counter() - started < 10  # five retries would take 23 seconds
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "no model directory 'nobody/nothing', and http://127.0.0.1:1 cannot be reached" in result.stderr


def test_demo_is_the_demo_model(
    run: Run, documents: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_blend.demo.demo_model_dir", lambda: model_dir)
    (tmp_path / "demo").mkdir()  # which is no model
    assert run("estimate", documents, "--model", "demo", "--no-time").exit_code == 0
    assert run("ingest", documents, "--model", "demo").exit_code == 0
    assert "rag-blend: there is no model directory 'absent'" in run("doctor", "absent").stderr
    assert run("doctor", "demo").exit_code == 0
