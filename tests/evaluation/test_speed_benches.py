"""Each speed bench on a random model: what it measures, and its command. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import rag_blend.ingest
from rag_blend import PromptTooLongError
from rag_blend.cli import app
from rag_blend.evaluation import Policy
from rag_blend.evaluation.speed import ingestion
from rag_blend.evaluation.speed.ingestion import measure_ingestion
from rag_blend.evaluation.speed.matching import Collection, measure_matching
from rag_blend.evaluation.speed.pipeline import measure_pipeline, pipeline_bound
from rag_blend.evaluation.speed.report import SpeedReport
from rag_blend.evaluation.speed.texts import Texts
from rag_blend.evaluation.speed.throughput import Load, measure_throughput
from rag_blend.evaluation.speed.ttft import POLICIES, RoundPrompts, measure_ttft
from rag_blend.evaluation.speed.ttft_view import CASES, OTHER_ORDER

pytest_plugins = ["toy_collection"]

CHUNK = 32
REUSE = {"reuse_when": "possible"}  # a model so small is faster without


def timings(row: Any) -> bool:
    return 0 < row["min_s"] <= row["median_s"] <= row["max_s"] and row["median_cpu_s"] >= 0 and row["lost"] >= 0


@pytest.fixture(scope="module")
def ttft_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ttft")


@pytest.fixture(scope="module")
def ttft_report(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ttft_out: Path) -> SpeedReport:
    return measure_ttft(model, tokenizer, Texts(tokenizer, CHUNK), [64, 96], 2, ttft_out, REUSE, progress=False)


@pytest.fixture(scope="module")
def pipeline_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> SpeedReport:
    policies = [Policy.parse("none/heads"), Policy.parse("reuse")]
    out, texts = tmp_path_factory.mktemp("pipeline"), Texts(tokenizer, CHUNK)
    return measure_pipeline(model, tokenizer, texts, 96, [2, 200], policies, 2, out, 0.001, progress=False)


class TestTtft:
    def of(self, report: SpeedReport, length: int, case: str) -> dict[str, Any]:
        return {row["contestant"]: row for row in report.rows if (row["length"], row["case"]) == (length, case)}

    def test_everyone_answers_every_case_of_every_length(self, ttft_report: SpeedReport) -> None:
        assert len(ttft_report.rows) == 2 * len(CASES) * (2 + len(POLICIES))
        for row in ttft_report.rows:
            assert timings(row) and row["gain"] > 0 and row["kl"] >= 0
            assert len(row["ttft_s"]) == len(row["cpu_s"]) == 2 and 0 < row["rows"] <= row["prompt_tokens"]

    def test_full_prefill_is_its_own_measure(self, ttft_report: SpeedReport) -> None:
        for length in (64, 96):
            for case in CASES:
                full = self.of(ttft_report, length, case)["full prefill"]
                assert full["kl"] == 0.0 and full["gain"] == 1.0 and full["rows"] == full["prompt_tokens"]
        assert (
            self.of(ttft_report, 96, "cold")["full prefill"]["rows"]
            > self.of(ttft_report, 64, "cold")["full prefill"]["rows"]
        )

    def test_a_prefix_cache_helps_where_prompts_begin_alike_only(self, ttft_report: SpeedReport) -> None:
        rows = {case: self.of(ttft_report, 96, case)["transformers, prefix cache"] for case in CASES}
        assert rows["cold"]["rows"] == rows["cold"]["prompt_tokens"] and rows["same prompt"]["rows"] == 1
        assert rows["same prompt"]["rows"] < rows["same prefix"]["rows"] < rows[OTHER_ORDER]["rows"]
        assert rows[OTHER_ORDER]["prompt_tokens"] - rows[OTHER_ORDER]["rows"] < CHUNK * 3 + 200  # the head
        assert all(row["kl"] < 1e-6 for row in rows.values())

    def test_blending_helps_with_chunks_that_were_ingested(self, ttft_report: SpeedReport) -> None:
        for name in POLICIES:
            cold, other = self.of(ttft_report, 96, "cold")[name], self.of(ttft_report, 96, OTHER_ORDER)[name]
            assert other["rows"] < cold["rows"] - CHUNK and other["kl"] > 0

    def test_ideal_is_beside_the_other_order_only(self, ttft_report: SpeedReport) -> None:
        for row in ttft_report.rows:
            wanted = row["case"] == OTHER_ORDER and row["contestant"] in ("full prefill", *POLICIES)
            assert (row["ideal_s"] is not None) == (row["to_ideal"] is not None) == wanted

    def test_it_resumes_and_leaves_no_caches(
        self, ttft_report: SpeedReport, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ttft_out: Path
    ) -> None:
        assert [path.name[:7] for path in ttft_out.iterdir()] == ["rounds-"]
        again = measure_ttft(model, tokenizer, Texts(tokenizer, CHUNK), [64, 96], 2, ttft_out, REUSE, progress=False)
        assert again.rows == ttft_report.rows

    def test_prompts_of_two_rounds_have_no_chunk_in_common(self, tokenizer: PreTrainedTokenizerFast) -> None:
        texts = Texts(tokenizer, CHUNK)
        one, two = (RoundPrompts.drawn_from(texts, 3) for _ in range(2))
        assert not set(one.chunks) & set(two.chunks)
        assert one.prompts["cold"] == one.prompts["same prompt"] != one.prompts["same prefix"]
        for chunk in one.chunks:
            assert chunk in one.first_order and chunk in one.prompts[OTHER_ORDER]
            assert chunk not in one.prompts["cold"] and chunk not in two.prompts[OTHER_ORDER]
        assert one.prompts[OTHER_ORDER].index(one.chunks[2]) < one.prompts[OTHER_ORDER].index(one.chunks[0])

    def test_lengths_are_checked(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match="length 63 has no room for two chunks"):
            measure_ttft(model, tokenizer, Texts(tokenizer, CHUNK), [63], 1, tmp_path, progress=False)
        with pytest.raises(PromptTooLongError, match="use smaller --lengths"):
            measure_ttft(model, tokenizer, Texts(tokenizer, 256), [4096], 1, tmp_path, progress=False)


class TestPipeline:
    def test_parts_add_up(self, pipeline_report: SpeedReport) -> None:
        assert [(row["policy"], row["rate"]) for row in pipeline_report.rows] == [
            ("none/heads", 2), ("none/heads", 200), ("reuse", 2), ("reuse", 200),
        ]  # fmt: skip
        for row in pipeline_report.rows:
            assert timings(row) and row["full_s"] > 0 and row["compute_s"] > 0
            assert max(row["load_s"], row["compute_s"]) <= row["bound_s"] <= row["sum_s"] and row["to_bound"] > 0

    def test_loading_takes_as_long_as_the_line_is_slow(self, pipeline_report: SpeedReport) -> None:
        for row in pipeline_report.rows:
            assert row["megabytes"] > 0
            assert row["load_s"] >= row["megabytes"] / row["rate"] and row["median_s"] >= row["megabytes"] / row["rate"]

    def test_the_bound(self) -> None:
        assert pipeline_bound(3.0, 1.0, 10) == pytest.approx(3.1) == pytest.approx(pipeline_bound(1.0, 3.0, 10))
        assert pipeline_bound(2.0, 1.0, 1) == 3.0  # nothing hides behind a single layer


class TestThroughput:
    def test_requests_of_several_clients(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        load = Load(requests=3, concurrency=[1, 2], new_tokens=3)
        report = measure_throughput(model, tokenizer, Texts(tokenizer, CHUNK), 64, load, 1, tmp_path, progress=False)
        names = ["full prefill", "rag_blend, heads", "rag_blend, default"]
        assert [(row["clients"], row["contestant"]) for row in report.rows] == [(c, n) for c in (1, 2) for n in names]
        for row in report.rows:
            assert timings(row) and row["requests_per_s"] == pytest.approx(3 / row["median_s"])
            assert 0 < row["tokens_per_s"] <= 3 * row["requests_per_s"] + 1e-9
            assert 0 < row["p50_s"] <= row["p95_s"] <= row["max_s"]
            assert row["gain"] == 1.0 or row["contestant"] != "full prefill"
        assert [path.name[:7] for path in tmp_path.iterdir()] == ["rounds-"]


class TestIngestion:
    def test_beside_plain_prefill(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        report = measure_ingestion(model, tokenizer, Texts(tokenizer, CHUNK), 3, 2, tmp_path, progress=False)
        plain, bare, primed = report.rows
        assert (plain["contestant"], plain["share"]) == ("plain batched prefill", 1.0)
        for row in report.rows:
            assert timings(row) and row["tokens_per_s"] > 0
            assert row["share"] == pytest.approx(row["tokens_per_s"] / plain["tokens_per_s"])
        sixteen_bits = 2 * 2 * 2 * 16 * 2  # layers, sides, heads, dims, bytes
        assert bare["bytes_per_token"] > sixteen_bits and primed["bytes_per_token"] > sixteen_bits
        assert bare["again_s"] > 0 and "bytes_per_token" not in plain
        assert [path.name[:7] for path in tmp_path.iterdir()] == ["rounds-"]

    def test_batches_are_those_of_ingestion(self) -> None:
        assert ingestion.BATCH_TOKENS == rag_blend.ingest._BATCH_TOKENS


class TestMatching:
    COLLECTION = Collection(chunk_tokens=64, prompt_tokens=300, vocabulary=5000)

    def test_by_number_of_chunks(self) -> None:
        small, large = measure_matching([10, 100], self.COLLECTION, 3, progress=False).rows
        for row in (small, large):
            assert timings(row) and row["median_ms"] == pytest.approx(1e3 * row["median_s"])
            assert row["covered"] == pytest.approx(4 * 64 / 300, abs=0.01)
        assert (small["chunks"], large["chunks"]) == (10, 100) and large["index_mb"] > small["index_mb"]

    def test_chunks_that_begin_alike_are_told_apart(self) -> None:
        shared = Collection(chunk_tokens=64, prompt_tokens=300, vocabulary=5000, shared_tokens=20)
        assert measure_matching([50], shared, 3, progress=False).rows[0]["covered"] > 0.8

    @pytest.mark.parametrize(("counts", "prompt_tokens"), [([], 300), ([0], 300), ([5], 70)])
    def test_sizes_are_checked(self, counts: list[int], prompt_tokens: int) -> None:
        with pytest.raises(ValueError, match=r"positive|no room"):
            measure_matching(counts, Collection(64, prompt_tokens), 1, progress=False)


class TestCommands:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["bench", *map(str, arguments)])

    @pytest.mark.parametrize(
        ("command", "options"),
        [
            ("ttft", ("--lengths", "64", "--chunk-tokens", 32)),
            ("pipeline", ("--length", 64, "--chunk-tokens", 32, "--rates", "50,500", "--policy", "none/heads")),
            ("throughput", ("--length", 64, "--chunk-tokens", 32, "--requests", 2, "--concurrency", "2")),
            ("ingest", ("--chunks", 2, "--chunk-tokens", 32)),
        ],
    )
    def test_json_reports_and_plots(
        self, command: str, options: tuple[object, ...], model_dir: Path, data_file: Path, tmp_path: Path
    ) -> None:
        common = ("--rounds", 1, "--out", "out", "--json", "--device", "cpu", "--dtype", "float32")
        result = self.run(command, "--model", model_dir, "--data", data_file, *common, *options)
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["bench"] == command and data["settings"]["texts"] == "toy" and data["rows"]
        assert data["environment"]["model"] == "tiny-model"
        names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
        assert names == {f"{command}.json", f"{command}.md", f"{command}.png"}
        assert json.loads((tmp_path / "out" / f"{command}.json").read_text("utf-8")) == data

    @pytest.mark.parametrize("command", ["ttft", "pipeline", "control", "throughput", "ingest"])
    def test_a_gpu_that_is_not_there_is_told(
        self, command: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        result = self.run(command, "--model", model_dir, "--device", "cuda", "--dtype", "bfloat16")
        assert result.exit_code == 2 and "finds no CUDA device here: use --device cpu" in result.stderr
        assert result.stderr.count("\n") == 1

    def test_match_needs_no_model_and_shows_a_table(self, tmp_path: Path) -> None:
        result = self.run("match", "--chunks", "20", "--chunk-tokens", 64, "--prompt-tokens", 300, "--rounds", 2)
        assert result.exit_code == 0, result.output
        assert "bytes per 64 tokens" in result.stdout and (tmp_path / "speed" / "match.md").exists()

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("match", "--chunks", "many"), "--chunks takes positive numbers separated by commas"),
            (("match", "--chunks", "0"), "--chunks takes positive numbers"),
            (("ttft", "--model", "absent"), "there is no model directory 'absent'"),
            (("ttft", "--model", "absent", "--device", "abacus"), "unknown device 'abacus'; known: cpu, cuda"),
            (("pipeline", "--model", "absent", "--policy", "nonsense"), "policy 'nonsense' is not of the form"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments: tuple[str, ...], complaint: str) -> None:
        result = self.run(*arguments)
        assert result.exit_code == 2 and complaint in result.stderr and result.stderr.count("\n") == 1
