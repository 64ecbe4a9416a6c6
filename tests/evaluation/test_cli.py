"""The command line on a tiny model: what it writes and prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from rag_blend.cli import app
from rag_blend.evaluation import Case

pytest_plugins = ["toy_collection"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def quality(model_dir: Path, data: Path, out: Path, *more: object) -> Result:
    return run("quality", "--model", model_dir, "--data", data, "--out", out, "--max-new-tokens", 4, *more)


def test_quality_writes_reports_and_shows_a_table(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = quality(model_dir, data_file, out, "--limit", 2, "--policy", "reuse", "--policy", "none/heads:0.3")
    assert result.exit_code == 0, result.output
    assert "toy, n = 2" in result.stdout and "none/heads:0.3" in result.stdout and "full prefill" in result.stdout
    data = json.loads((out / "quality.json").read_text("utf-8"))
    assert data["environment"]["model"] == "tiny-model"
    assert [policy["name"] for policy in data["policies"]] == ["reuse", "none/heads:0.3"]
    assert {path.name for path in out.glob("quality*")} == {
        "quality.json", "quality.md", "quality-recompute.png", "quality-ttft.png",
    }  # fmt: skip
    assert (out / "kv").is_dir() and len(list(out.glob("cases-*.jsonl"))) == 1


def test_json_and_more_tasks(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    tasks = ["--tasks", "unanswerable, copy,lookup", "--limit", 1, "--policy", "reuse"]
    tasks += ["--passages", 4, "--shuffle", "--join", 2]
    result = quality(model_dir, data_file, tmp_path, "--json", "--storage", tmp_path / "kv", *tasks)
    assert result.exit_code == 0, result.output
    groups = json.loads(result.stdout)["groups"]
    assert list(groups) == ["toy", "toy/unanswerable", "toy/copy", "lookup"]
    assert groups["toy/copy"]["summaries"][-1]["verbatim"] is not None


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--policy", "nonsense"], "policy 'nonsense' is not of the form"),
        (["--policy", "reuse", "--policy", "reuse"], "names of their own"),
        (["--tasks", "sing"], "unknown task 'sing'; known: unanswerable, copy, lookup"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (["--model", "absent"], "there is no model directory 'absent'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_two(
    model_dir: Path, data_file: Path, tmp_path: Path, more: list[str], complaint: str
) -> None:
    result = quality(model_dir, data_file, tmp_path, *more)
    assert result.exit_code == 2
    assert complaint in result.stderr and result.stderr.startswith("rag-blend: ")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_prompt_that_is_too_long(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    result = quality(model_dir, data_file, tmp_path, "--max-new-tokens", 5000)
    assert result.exit_code == 2 and "context window is 4096; use fewer passages" in result.stderr


def test_figures_are_drawn_of_the_cases(
    model_dir: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(model: PreTrainedModel, tokenizer: object, cases: list[Case], out: Path) -> list[Path]:
        assert model.config.hidden_size == 64 and [len(case.passages) for case in cases] == [3, 3]
        return [out / "one.png"]

    monkeypatch.setattr("rag_blend.evaluation.figures.draw_figures", draw)
    options = ("--limit", 2, "--passages", 3, "--out", tmp_path)
    result = run("figures", "--model", model_dir, "--data", data_file, *options)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'one.png'}\n")


def test_figures_without_matplotlib(
    model_dir: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = run("figures", "--model", model_dir, "--data", data_file, "--out", tmp_path)
    assert result.exit_code == 2 and "pip install" in result.stderr and '".[bench]"' in result.stderr


def test_reports_are_written_without_matplotlib(
    model_dir: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = quality(model_dir, data_file, tmp_path, "--limit", 1, "--policy", "reuse", "--json")
    assert result.exit_code == 0 and 'pip install -e ".[bench]"' in result.stderr
    assert (tmp_path / "quality.md").exists() and not list(tmp_path.glob("*.png"))


def test_numbers_are_checked(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    assert quality(model_dir, data_file, tmp_path, "--limit", 0).exit_code == 2


def test_help_names_the_options() -> None:
    result = run("quality", "--help")
    assert result.exit_code == 0
    assert all(option in result.stdout for option in ("--model", "--data", "--policy", "--tasks", "--json"))


def test_python_m() -> None:
    done = subprocess.run([sys.executable, "-m", "rag_blend", "bench", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "quality" in done.stdout and "figures" in done.stdout
