"""`rag-blend demo` on a tiny model and documents of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_text
from typer.testing import Result

pytest.importorskip("faiss")
pytest.importorskip("wordllama")

from rag_blend.demo import DemoModelMissingError

pytest_plugins = ["toy_documents"]
pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., Result]
POLICIES = ["full prefill", "CacheBlend as published", "rag_blend", 'rag_blend, selector="heads"']


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    for seed in range(6):
        (directory / f"{seed}.md").write_text(f"# Part {seed}\n\n{random_text(seed, 150)}")
    return directory


def test_four_answers_to_six_questions(run: Run, texts: Path, model_dir: Path) -> None:
    result = run("demo", "--documents", texts, "--model", model_dir, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["medians"]) == POLICIES and len(found["answers"]) == 6
    assert found["medians"]["full prefill"]["kl"] == 0 and found["medians"]["full prefill"]["gain"] == 1
    prompts = {answer["prompt_tokens"] for answer in found["answers"][0].values()}
    assert len(prompts) == 1, "all answer the same prompt"
    reused = [found["answers"][0][name]["reused_tokens"] for name in POLICIES]
    assert reused[0] == 0 and all(reused[1:])


def test_tables_and_the_second_run(run: Run, texts: Path, model_dir: Path) -> None:
    first = run("demo", "--model", model_dir, env={"DOCS": str(texts)})  # as `DOCS=... make demo`
    assert first.exit_code == 0, first.output
    assert "6 documents" in first.stdout and "chunks prefilled once" in first.stdout
    assert "Medians over 6 questions" in first.stdout
    second = run("demo", "--documents", texts, "--model", model_dir)
    assert "were in the store already" in second.stdout and "prefilled once" not in second.stdout


def test_no_documents(run: Run, tmp_path: Path, model_dir: Path) -> None:
    result = run("demo", "--documents", tmp_path, "--model", model_dir)
    assert result.exit_code == 2 and "No documents found in " in result.stderr and result.stderr.count("\n") == 1


def test_without_the_demo_model_the_lines_to_run_are_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise DemoModelMissingError("Run:\n\n    pip install one\n    pip install two")

    monkeypatch.setattr("rag_blend.demo.demo_model_dir", missing)
    result = run("demo")
    assert (result.exit_code, result.stderr) == (2, "rag-blend: Run:\n\n    pip install one\n    pip install two\n")
