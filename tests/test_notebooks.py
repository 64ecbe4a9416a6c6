"""The notebooks run from top to bottom, on a tiny model, and are committed as somebody should find them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import random_model, small_tokenizer

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
for needed in ("ipykernel", "langchain_core", "llama_index.core", "matplotlib", "wordllama"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
MOST_OUTPUT = 5_000  # characters, of a committed notebook
ANSWERED = r"(?!0)\d+ of \d+ tokens"  # something was reused
# What each must say, how often at least, and how many pictures it draws.
RESULTS: dict[str, tuple[dict[str, int], int]] = {
    "01_llama_index_in_ten_minutes": (
        {
            r"(?!0)\d+ chunks prefilled in \d+ s, 0 were cached": 1,
            r"\d tokens: (?!0)\d+ from caches": 2,
            r"full prefill: .* first token; reuse": 2,
            r"^1 chunk more$": 1,
            r"^2 chunks of that prompt came from the store": 1,  # the head and the note
            r"^0 chunks more$": 1,
        },
        1,
    ),
    "02_langchain_in_ten_minutes": (
        {
            rf"^  {ANSWERED} from caches": 3,
            r"^  0 of \d+ tokens from caches": 2,
            r"^1 cache more$": 1,
            r"^0 caches more$": 1,
        },
        1,
    ),
    "03_why_it_works": (
        {r"^unprimed: (?!0)\d+ tokens": 1, r"^primed: (?!0)\d+ tokens": 1, r"full prefill again: KL \d.\de-(?!0)\d": 1},
        4,
    ),
    "04_your_own_corpus": (
        {
            r"^2 documents$": 1,
            r"int4: (?!0)\d+ chunks, .* about": 1,
            r"^2 documents are new, 0 changed": 1,
            r"^first: (?!0)\d+ chunks cached": 1,
            r"^again: 0 chunks cached": 1,
            r"KL \d.*(passed|not close enough)$": 1,
            r"^from now on: .* \(calibrated\)$": 1,
            r"^(?!0)\d+ entries, .*: 0 damaged$": 1,
            r"first token after .* tokens reused": 2,
            r"^requests: .*\d": 1,
        },
        1,
    ),
    "05_write_a_selector": (
        {r"hkvd: \d+% the same": 1, r"^(none|sample)/mine:0.15 +\d.* \d+/\d+$": 2, r"^sample/anchor:0.15 ": 1},
        1,
    ),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few layers, because the figures compare neighbouring ones; a token is a letter or two, so prompts are long."""
    directory = tmp_path_factory.mktemp("models") / "tiny-model"
    random_model(num_hidden_layers=4, max_position_embeddings=16384).save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


def test_there_are_results_for_all() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(RESULTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(
    path: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**ENVIRONMENT, "RAG_BLEND_MODEL": model_dir, "RAG_BLEND_STORAGE": tmp_path / "kv"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    said = "\n".join("".join(one.text for one in cell if one.get("name") == "stdout") for cell in outputs)
    patterns, pictures = RESULTS[path.stem]
    for pattern, count in patterns.items():
        assert len(re.findall(pattern, said, re.MULTILINE)) >= count, f"{pattern} in:\n{said}"
    assert sum(is_picture(one.get("data", {})) for cell in outputs for one in cell) == pictures
    assert not (tmp_path / ".demo").exists(), "it writes where RAG_BLEND_STORAGE says"


def is_picture(data: dict[str, Any]) -> bool:
    return "image/png" in data or "rag-blend" in data.get("text/html", "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_as_it_should_be(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("[a-z-]+", one) for one in ids), "names that stay"
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[1].id == "parameters"
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert len(str([output for output in outputs if output])) <= MOST_OUTPUT
    assert not re.search(r"(?<![\w.:/])/(home|root|tmp|Users|work)/", path.read_text("utf-8"))


def test_the_quickstart_lists_all() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    assert all(f"examples/notebooks/{path.name}" in page for path in NOTEBOOKS)
