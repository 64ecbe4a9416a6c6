"""The quickstart and the notebook run, on a tiny model and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("wordllama")

from toy_llama_index import TEXTS, save_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(300)  # a process of its own imports everything again
def test_the_quickstart(model_dir, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in TEXTS.items():
        (docs / f"{name}.txt").write_text(text)
    arguments = ["--model", model_dir, "--docs", docs, "--storage", tmp_path / "kv", "--chunk-tokens", "200"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "llama_index_quickstart.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "4 chunks prefilled, 0 were cached already" in done.stdout
    assert done.stdout.count(" s)") == 3


def test_the_quickstart_differs_from_a_stock_script_where_it_says_so():
    lines = (EXAMPLES / "llama_index_quickstart.py").read_text("utf-8").splitlines()
    marked = [line for line in lines if "# >>>" in line]
    assert len(marked) == 3
    ours = [line for line in lines if "BlendLLM" in line.partition("#")[0] or "attach" in line]
    # The class, where it is imported and made; and the line that is added.
    assert len(ours) == 3


@pytest.mark.timeout(300)
def test_the_notebook(model_dir, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in {**ENVIRONMENT, "RAG_BLEND_MODEL": model_dir, "RAG_BLEND_STORAGE": tmp_path / "kv"}.items():
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(EXAMPLES / "llama_index_chat.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "commit it without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}
    )
    client.execute()
    said = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output)
    assert said.count("from caches") == 3
