"""The control bench on a random model: what is asked of whom, what is counted, how it is shown. No time is judged."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from rag_blend import BlendEngine, GenerationStats, PromptTooLongError
from rag_blend.cli import app
from rag_blend.control import Controller
from rag_blend.evaluation.speed.page import page_of, read_results
from rag_blend.evaluation.speed.report import SpeedReport
from rag_blend.evaluation.speed.sweep import CHUNKS, Case, Sweep, measure_control
from rag_blend.evaluation.speed.sweep_view import VIEW, rows_of

pytest_plugins = ["toy_collection"]

LATENCY_S = 0.02
SWEEP = Sweep([128, 256], [0, 0.5, 1], ["memory", "disk", "200"], LATENCY_S)
ROUNDS = 2


class Asked(NamedTuple):
    engine: BlendEngine
    prompt: str
    reuse: bool
    stats: GenerationStats


class Run(NamedTuple):
    report: SpeedReport
    asked: list[Asked]
    out: Path

    def cases(self) -> dict[tuple[Any, ...], Any]:
        return {(row["store"], row["length"], row["hits"]): row for row in self.report.rows if "length" in row}


@pytest.fixture(scope="module")
def run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Run:
    asked: list[Asked] = []
    prefill = BlendEngine.prefill

    def spied(engine: BlendEngine, prompt: str, **options: Any) -> Any:
        found = prefill(engine, prompt, **options)
        asked.append(Asked(engine, prompt, options["reuse"], found.stats))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlendEngine, "prefill", spied)
        patch.setattr(Controller, "best", lambda self, plan, places, work_of: plan)
        out = tmp_path_factory.mktemp("control")
        return Run(measure_control(model, tokenizer, SWEEP, ROUNDS, out, progress=False), asked, out)


class TestWhatIsAsked:
    def test_both_get_each_prompt_once_and_no_two_are_alike(self, run: Run) -> None:
        prompts = Counter((one.prompt, one.reuse) for one in run.asked)
        assert set(prompts.values()) == {1}
        assert len(prompts) == 2 * len({one.prompt for one in run.asked}) == 2 * (ROUNDS + 1) * len(SWEEP.cases)

    def test_who_decides_learns_from_no_full_prefill(self, run: Run) -> None:
        full, ours = ({id(one.engine) for one in run.asked if one.reuse == reuse} for reuse in (False, True))
        assert len(full) == 1 and len(ours) == len(SWEEP.stores) and not full & ours

    def test_as_many_chunks_are_stored_as_the_case_says(self, run: Run) -> None:
        found = Counter(one.stats.hits for one in run.asked if one.reuse)
        head = 1
        times = (ROUNDS + 1) * len(SWEEP.cases) // len(SWEEP.hits)
        assert found == {head + round(hits * CHUNKS): times for hits in SWEEP.hits}

    def test_cases_are_mixed_and_take_turns(self, run: Run) -> None:
        per_round = 2 * len(SWEEP.cases)
        rounds = [run.asked[at : at + per_round] for at in range(0, len(run.asked), per_round)]
        orders = [[one.stats.hits for one in some if one.reuse] for some in rounds]
        assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1] != orders[2]
        assert [some[0].reuse for some in rounds] == [False, False, True]  # the first is not counted


class TestWhatIsCounted:
    def test_a_row_for_each_case_behind_those_in_short(self, run: Run) -> None:
        assert list(run.cases()) == [(c.store, c.length, c.hits) for c in SWEEP.cases]
        in_short = run.report.rows[: len(SWEEP.stores) + 1]
        assert [row["store"] for row in in_short] == ["memory", "disk", "200", "all"]
        assert [row["cases"] for row in in_short] == [6, 6, 6, 18]

    def test_what_became_of_the_chunks(self, run: Run) -> None:
        for (_, _, hits), row in run.cases().items():
            assert row["modes"] == {"blend" if hits else "prefix": ROUNDS}  # where no chunk is stored, the head is
            assert row["declined"] == 0 and row["missed"] == 0
            assert row["full_s"] > 0 and 0 < row["least_to_full"] <= row["to_full"] <= row["most_to_full"]

    def test_a_slow_line_is_slow(self, run: Run) -> None:
        assert all(row["min_s"] >= LATENCY_S for (store, *_), row in run.cases().items() if store == "200")

    def test_it_resumes_and_leaves_no_caches(
        self, run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert [path.name[:7] for path in run.out.iterdir()] == ["rounds-"]
        monkeypatch.setattr(BlendEngine, "prefill", pytest.fail)
        assert measure_control(model, tokenizer, SWEEP, ROUNDS, run.out, progress=False).rows == run.report.rows

    def test_what_is_declined(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(Controller, "best", lambda self, plan, places, work_of: replace(plan, segments=()))
        sweep = Sweep([128], [1], ["memory"])
        row = measure_control(model, tokenizer, sweep, 1, tmp_path, progress=False).rows[-1]
        assert row["declined"] == 1 and row["modes"] == {"full": 1}


def sample(hits: float, to_full: float, **more: Any) -> dict[str, Any]:
    counts = {"used": 2, "declined": 0, "missed": 0, "mode": "blend", "prompt_tokens": 200}
    times = {"full_s": 1.0, "wall_s": to_full, "cpu_s": to_full, "to_full": to_full}
    return {**Case(128, hits, "50")._asdict(), **counts, **times, **more}


class TestWhatIsShown:
    SAMPLES = (
        *(sample(0.5, ratio, mode=mode) for ratio, mode in ((1.0, "full"), (1.2, "blend"), (1.1, "blend"))),
        sample(1, 0.5, declined=6, length=512),
        sample(1, 0.8, missed=3),
        sample(0, 1.05, used=0, mode="full"),
    )

    def test_in_short(self) -> None:
        one, all_, *cases = rows_of(list(self.SAMPLES), ["50"])
        assert {**one, "store": "all"} == all_ and len(cases) == all_["cases"] == 4
        assert all_["worst"] == 1.1 and all_["above"] == 1 and all_["gains"] == pytest.approx([1.25, 2.0])

    def test_tables(self) -> None:
        tables = SpeedReport(VIEW, {}, {}, rows_of(list(self.SAMPLES), ["50"])).tables()
        assert list(tables) == ["in short", "50 MB/s"]
        assert tables["in short"] == [
            ["store", "cases", "worst by full", "above 1.05", "gain"],
            ["50 MB/s", "4", "1.10", "1", "1.25x to 2.00x"],
            ["all", "4", "1.10", "1", "1.25x to 2.00x"],
        ]
        header, nothing, half, whole, longer = tables["50 MB/s"]
        assert header[:3] == ["tokens of chunks", "stored", "full s"]
        assert header[-4:] == ["lost", "declined", "missed", "mode"]
        assert half[:2] == ["128", "50.0%"] and half[4] == "1.10 (1.00-1.20)" and half[-1] == "blend 2, full 1"
        assert nothing[-3:] == ["", "0", "full"]
        assert whole[-3:] == ["0%", "3", "blend"] and longer[-3:] == ["75%", "0", "blend"]

    def test_without_a_case_in_which_everything_is_stored(self) -> None:
        report = SpeedReport(VIEW, {}, {}, rows_of(list(self.SAMPLES[:3]), ["50"]))
        assert report.tables()["in short"][0][-1] == "above 1.05"

    def test_a_panel_for_each_store_and_a_line_for_each_share(self, run: Run) -> None:
        panels = VIEW.panels(run.report.rows)
        assert [panel.title for panel in panels] == ["memory", "disk", "200 MB/s"]
        for panel in panels:
            assert [line.label for line in panel.lines] == ["0 stored", "0.5 stored", "1 stored"]
            assert all(list(line.x) == SWEEP.lengths for line in panel.lines)

    def test_on_the_page_of_all_benches(self, run: Run, tmp_path: Path) -> None:
        run.report.write(tmp_path)
        page = page_of(read_results([tmp_path]))
        assert "## Never slower than full prefill" in page and "### in short" in page and "### 200 MB/s" in page


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"lengths": []}, "a length, a share of hits and a store at least"),
            ({"lengths": [127]}, "length 127 has no room for 8 chunks: use 128 or more"),
            ({"hits": [0.3]}, "hits are eighths.*not 0.3"),
            ({"hits": [float("nan")]}, "hits are eighths"),
            ({"stores": ["tape"]}, "memory, disk, or a speed in MB/s, not 'tape'"),
            ({"stores": ["0"]}, "a speed in MB/s, not '0'"),
            ({"stores": ["nan"]}, "a speed in MB/s, not 'nan'"),
            ({"stores": ["5"], "latency_s": -1.0}, "no negative latency"),
        ],
    )
    def test_what_is_no_sweep(self, changes: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            replace(SWEEP, **changes)

    def test_prompts_that_do_not_fit(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        with pytest.raises(PromptTooLongError, match="use smaller --lengths"):
            measure_control(model, tokenizer, Sweep([4096], [0], ["memory"]), 1, tmp_path, progress=False)


class TestCommand:
    def bench(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["bench", "control", *map(str, arguments)])

    def test_json_report_and_plot(self, model_dir: Path, tmp_path: Path) -> None:
        result = self.bench(
            "--model", model_dir, "--lengths", 128, "--hits", "0,1", "--stores", "memory, 100", "--latency-ms", 1,
            "--rounds", 1, "--out", tmp_path / "out", "--json",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["bench"] == "control" and data["settings"]["latency of slow lines"] == "1 ms"
        assert [row["hits"] for row in data["rows"][3:]] == [0, 1, 0, 1]
        names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
        assert names == {"control.json", "control.md", "control.png"}

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("--hits", "-1,0"), "--hits takes numbers from 0 on separated by commas"),
            (("--hits", "0.1"), "hits are eighths"),
            (("--stores", "memory,fast"), "a store is memory, disk, or a speed in MB/s, not 'fast'"),
            (("--lengths", "100"), "length 100 has no room for 8 chunks"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments: tuple[str, ...], complaint: str) -> None:
        result = self.bench("--model", "absent", *arguments)
        assert result.exit_code == 2 and complaint in result.stderr and result.stderr.count("\n") == 1
