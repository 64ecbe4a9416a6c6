"""The LangChain examples run, on a tiny random model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("wordllama")

from langchain_toys import save_toy

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


def test_the_quickstart_reuses_what_it_has_indexed(model_dir, tmp_path):
    command = [sys.executable, str(EXAMPLES / "langchain_quickstart.py"), "--model", model_dir, "--fast"]
    command += ["--storage", str(tmp_path / "kv"), "--max-tokens", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = [line for line in done.stdout.splitlines() if "from caches" in line]
    assert len(figures) == 4
    assert all(" 0 of " in line for line in figures[::2])
    assert not any(" 0 of " in line for line in figures[1::2])


@pytest.mark.timeout(300)
def test_the_notebook_runs_and_holds_no_output(model_dir, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "langchain_agent.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    monkeypatch.setenv("RAG_BLEND_MODEL", model_dir)
    monkeypatch.setenv("RAG_BLEND_STORAGE", str(tmp_path / "kv"))
    monkeypatch.setenv("RAG_BLEND_FAST", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])))
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert said.count("from caches") == 5
    assert "-- 0 of" in said  # without reuse
