"""The codec bench on a random model: what it measures, that it measures the right stores, and its command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import rag_blend.codecs
from rag_blend import PromptTooLongError
from rag_blend.cli.codecs import codecs as command
from rag_blend.codecs import codec_names
from rag_blend.evaluation import Case, Passage, Policy, QualityBench
from rag_blend.evaluation.codec_report import CodecReport, CodecResult
from rag_blend.evaluation.codecs import measure_codecs

pytest_plugins = ["toy_collection"]

TOKENS = 6
REUSE = Policy.parse("reuse")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codecs") / "new"


@pytest.fixture(scope="module")
def report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case], directory: Path
) -> CodecReport:
    return measure_codecs(model, tokenizer, cases, codec_names(), directory, REUSE, TOKENS, progress=False)


@pytest.fixture(scope="module")
def by_name(report: CodecReport) -> dict[str, CodecResult]:
    return {result.codec: result for result in report.results}


def test_every_codec_is_measured_raw_first(report: CodecReport) -> None:
    names = [result.codec for result in report.results]
    assert names[0] == "raw" and sorted(names) == list(codec_names())
    assert len(report.prompt_tokens) == 3 and report.policy["name"] == "reuse"


def test_sizes(by_name: dict[str, CodecResult]) -> None:
    assert by_name["raw"].ratio == 1.0
    assert 2 * 2 * 2 * 16 * 2 < by_name["raw"].bytes_per_token < 1.5 * 2 * 2 * 2 * 16 * 2  # layers, sides, heads, dims
    assert 1.0 < by_name["zstd"].ratio < by_name["int8"].ratio < by_name["int4"].ratio
    for one in by_name.values():
        assert one.ratio == pytest.approx(by_name["raw"].bytes_per_token / one.bytes_per_token)
        assert min(one.write_gb_s, one.read_gb_s, one.ttft_s) > 0


def test_errors_are_those_of_each_codec(by_name: dict[str, CodecResult]) -> None:
    for name in ("raw", "zstd"):
        assert by_name[name].key_error == by_name[name].value_error == 0.0
    assert 0.001 < by_name["int8"].key_error < 0.01 and 0.001 < by_name["int8"].value_error < 0.01
    assert 10 < by_name["int4"].key_error / by_name["int8"].key_error < 20
    assert 10 < by_name["int4"].value_error / by_name["int8"].value_error < 20


def test_answers_come_from_each_codecs_own_store(by_name: dict[str, CodecResult]) -> None:
    raw, zstd, int8, int4 = (by_name[name] for name in ("raw", "zstd", "int8", "int4"))
    assert raw.kl.estimate > 0.0 and raw.kl_to_raw == zstd.kl_to_raw == (0.0, 0.0, 0.0)
    assert raw.kl == zstd.kl and raw.agreement_with_raw == (1.0, 1.0, 1.0)
    assert 0.0 < int8.kl_to_raw.estimate < int4.kl_to_raw.estimate


def test_raw_is_what_the_quality_bench_measures(
    by_name: dict[str, CodecResult], model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    with QualityBench(model, tokenizer, None, [REUSE], TOKENS, num_floors=0) as bench:
        bench.prepare(cases, progress=False)
        summary = bench.run(cases, progress=False).groups["toy"][-1]
    assert summary.kl is not None and summary.agreement is not None
    assert by_name["raw"].kl == pytest.approx(summary.kl, rel=1e-4)
    assert by_name["raw"].agreement == summary.agreement


def test_the_report(report: CodecReport, directory: Path, tmp_path: Path) -> None:
    assert list(directory.iterdir()) == []  # the stores are gone
    data = json.loads(report.to_json())
    assert [one["codec"] for one in data["codecs"]] == [result.codec for result in report.results]
    assert set(data["codecs"][1]["kl"]) == {"estimate", "low", "high"}
    assert data["environment"]["max_new_tokens"] == str(TOKENS) and len(data["prompt_tokens"]) == 3
    assert {len(row) for row in report.table()} == {12} and len(report.table()) == 1 + len(codec_names())
    markdown = report.to_markdown()
    assert "| int4 |" in markdown and "Policy reuse, n = 3" in markdown
    assert {path.name for path in report.write(tmp_path)} == {"codecs.json", "codecs.md"}
    assert (tmp_path / "codecs.md").read_text("utf-8") == markdown


class TestRefusals:
    @pytest.fixture
    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
        def run(cases: list[Case], *names: str, **more: Any) -> CodecReport:
            return measure_codecs(model, tokenizer, cases, names, tmp_path / "kv", progress=False, **more)

        return run

    def test_an_unknown_codec(self, measure: Any, cases: list[Case], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="unknown codec"):
            measure(cases, "int5")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_to_reuse(self, measure: Any) -> None:
        short = Case("0", "qa", "why?", ("so",), (Passage("the old river", "", False),), dataset="toy")
        with pytest.raises(ValueError, match="no case has a passage"):
            measure([short], "int8")

    def test_a_prompt_that_is_too_long(self, measure: Any, cases: list[Case], tmp_path: Path) -> None:
        with pytest.raises(PromptTooLongError):
            measure(cases, "int8", max_new_tokens=5000)
        assert list((tmp_path / "kv").iterdir()) == []


# --- the command ---


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, arguments)))


def bench(model_dir: Path, data: Path, out: Path, *more: object) -> Result:
    return run("--model", model_dir, "--data", data, "--out", out, "--limit", 1, "--max-new-tokens", 3, *more)


def test_a_table_is_shown_and_reports_are_written(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    result = bench(model_dir, data_file, tmp_path / "out", "--codec", "int8", "--policy", "none/heads:0.3")
    assert result.exit_code == 0, result.output
    assert "bytes/token" in result.stdout and "int8" in result.stdout and "1 prompts" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"codecs.json", "codecs.md"}
    data = json.loads((tmp_path / "out" / "codecs.json").read_text("utf-8"))
    assert [one["codec"] for one in data["codecs"]] == ["raw", "int8"]
    assert data["policy"]["selector"] == "heads" and data["environment"]["model"] == "tiny-model"


def test_json_of_all_codecs(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    result = bench(model_dir, data_file, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert {one["codec"] for one in json.loads(result.stdout)["codecs"]} == set(codec_names())


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--codec", "int5"], "unknown codec 'int5'; known: int4, int8, raw, zstd"),
        (["--policy", "nonsense"], "policy 'nonsense' is not of the form"),
        (["--model", "absent"], "there is no model directory 'absent'"),
    ],
)
def test_a_mistake_is_one_line(
    model_dir: Path, data_file: Path, tmp_path: Path, more: list[str], complaint: str
) -> None:
    result = bench(model_dir, data_file, tmp_path, *more)
    assert result.exit_code == 2 and complaint in result.stderr and result.stderr.count("\n") == 1


@pytest.fixture
def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "rag_blend.codecs.zstd", raising=False)
    rag_blend.codecs._own.cache_clear()
    yield
    rag_blend.codecs._own.cache_clear()


@pytest.mark.usefixtures("without_zstandard")
def test_a_missing_library(model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    asked = bench(model_dir, data_file, tmp_path, "--codec", "zstd")
    assert asked.exit_code == 2 and 'pip install -e ".[zstd]"' in asked.stderr
    result = bench(model_dir, data_file, tmp_path, "--json")
    assert result.exit_code == 0 and "without zstd" in result.stderr
    assert {one["codec"] for one in json.loads(result.stdout)["codecs"]} == set(codec_names()) - {"zstd"}
