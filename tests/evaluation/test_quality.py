"""The bench on a random model: floors, order, honesty about what was reused, resumption, reports and plots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rag_blend import BlendEngine, PromptTooLongError
from rag_blend.evaluation import (
    Case,
    Passage,
    Policy,
    QualityBench,
    QualityReport,
    copy_cases,
    journal,
    prompts,
    unanswerable,
)
from rag_blend.evaluation.journal import Journal, code_digest, configuration_of
from rag_blend.evaluation.plots import draw_plots
from rag_blend.evaluation.reference import LogitsRecorder
from rag_blend.evaluation.results import Answer, CaseResult
from rag_blend.teacher import forced_logits

pytest_plugins = ["toy_collection"]

POLICIES = ("published", "reuse", "default")
TOKENS = 6


def bench_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *names: str, **more: Any) -> QualityBench:
    return QualityBench(model, tokenizer, None, [Policy.parse(name) for name in names], TOKENS, **more)


@pytest.fixture(scope="module")
def report(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]) -> Iterator[QualityReport]:
    derived = [unanswerable(cases[0]), *copy_cases(cases[0].passages, 1, num_passages=2)]
    with bench_of(model, tokenizer, *POLICIES) as bench:
        bench.prepare([*cases, *derived], progress=False)
        yield bench.run([*cases, *derived], progress=False)


class TestMeasurements:
    def test_the_reference_is_the_models_own_greedy_answer(
        self, report: QualityReport, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
    ) -> None:
        ids = torch.tensor([prompts.case_ids(tokenizer, cases[0])])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
        answer = report.results[0].full.answer
        assert answer is not None
        assert answer.text == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.num_tokens == plain.shape[1] - ids.shape[1]

    def test_floors(self, report: QualityReport) -> None:
        for result in report.results:
            assert set(result.floors) == {"full again", "r = 1"}
            for floor in result.floors.values():
                assert floor.fidelity is not None
                assert floor.fidelity.kl < 1e-5 and floor.fidelity.agreement == 1.0
            assert result.floors["r = 1"].stats["mode"] == "blend"

    def test_floors_are_measured_on_the_first_cases_of_each_group(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
    ) -> None:
        with bench_of(model, tokenizer, "published", num_floors=1) as bench:
            bench.prepare(cases, progress=False)
            some = bench.run([*cases[:2], *(replace(case, task="lookup") for case in cases[:2])], progress=False)
        assert [sorted(result.floors) for result in some.results] == [["full again", "r = 1"], []] * 2
        for lines in some.groups.values():
            assert [(line.name, line.num_cases) for line in lines] == [
                ("full prefill", 2), ("full again", 1), ("r = 1", 1), ("published", 2)
            ]  # fmt: skip

    def test_reuse_is_not_free(self, report: QualityReport) -> None:
        for result in report.results:
            fidelity = result.policies["reuse"].fidelity
            assert fidelity is not None and fidelity.kl > 1e-5
            assert result.policies["reuse"].stats["recompute_ratio"] == 0.0

    def test_what_the_engine_reports_is_kept(self, report: QualityReport, cases: list[Case]) -> None:
        for result in report.results:
            for name in POLICIES:
                stats = result.policies[name].stats
                assert (stats["mode"], stats["misses"]) == ("blend", 0) and stats["hits"] > 2
            assert result.full.stats["mode"] == "full"

    def test_the_order_rotates(self, report: QualityReport) -> None:
        orders = [result.order for result in report.results[:4]]
        assert orders[0] == POLICIES
        assert orders[1] == ("reuse", "default", "published") and orders[2] == ("default", "published", "reuse")
        assert orders[3] == orders[0]
        assert all(tuple(result.policies) == POLICIES for result in report.results)

    def test_a_policys_text_is_what_it_would_generate(
        self, report: QualityReport, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
    ) -> None:
        with BlendEngine(model, tokenizer, None, prime="none") as engine:
            engine.ingest([p.prompt_text for p in cases[0].passages], prompts.head_ids(tokenizer), progress=False)
            for case, result in zip(cases, report.results, strict=False):
                ids = prompts.case_ids(tokenizer, case)
                own = engine.generate(ids, TOKENS, selector="none", do_sample=False)
                answer = result.policies["reuse"].answer
                assert answer is not None and answer.text == own.text
        answers = [(result.policies["reuse"].answer, result.full.answer) for result in report.results[: len(cases)]]
        assert any(own != full for own, full in answers)  # or nothing was generated

    def test_copying_gets_room_for_the_text(self, report: QualityReport) -> None:
        answer = report.results[-1].full.answer
        assert answer is not None and answer.verbatim is not None and answer.num_tokens > 40
        assert report.results[0].full.answer is not None and report.results[0].full.answer.verbatim is None

    def test_a_policy_without_chunks_is_seen_to_be_full_prefill(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
    ) -> None:
        with bench_of(model, tokenizer, "reuse") as bench:
            report = bench.run(cases[:1], progress=False)  # nothing was prepared
        summary = report.groups["toy"][-1]
        assert summary.name == "reuse" and summary.blended == (0, 1) and summary.recompute_ratio == 1.0
        assert report.results[0].policies["reuse"].stats["mode"] == "full"


def test_forced_logits_are_those_of_decoding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    with BlendEngine(model, tokenizer, None, prime="none") as engine:
        engine.ingest([p.prompt_text for p in cases[0].passages], prompts.head_ids(tokenizer), progress=False)
        ids = prompts.case_ids(tokenizer, cases[0])
        for how in ({"reuse": False}, {"selector": "none"}, {"selector": "heads"}):
            recorder = LogitsRecorder()
            answer = engine.generate(ids, TOKENS, do_sample=False, logits_processor=[recorder], **how)
            forced = forced_logits(model, engine.prefill(ids, **how), answer.token_ids)
            assert forced.shape == recorder.logits().shape == (len(answer.token_ids), 512)
            assert torch.allclose(forced, recorder.logits(), atol=1e-4)
            one = forced_logits(model, engine.prefill(ids, **how), answer.token_ids[:1])
            assert torch.allclose(one, forced[:1], atol=1e-6)


def test_copying_may_begin_with_the_title(passages: list[Passage]) -> None:
    (case,) = copy_cases(passages, 1)
    wanted, titled = case.answers
    halves = [" ".join(text.split()[:20]) for text in (wanted, titled)]
    judged = [Answer.to(case, text, 1).verbatim for text in (wanted, titled, *halves, "no")]
    assert judged == [1.0, 1.0, 0.5, pytest.approx(20 / 42), 0.0]


class TestResuming:
    def test_what_is_known_is_not_measured_again(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        cases: list[Case],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with bench_of(model, tokenizer, "reuse", "none/heads", out=tmp_path) as bench:
            bench.prepare(cases, progress=False)
            first = bench.run(cases[:2], progress=False)
        calls: list[int] = []
        measure = QualityBench._measure

        def counted(self: QualityBench, case: Case, key: str, ids: list[int], number: int, *more: Any) -> CaseResult:
            calls.append(number)
            return measure(self, case, key, ids, number, *more)

        monkeypatch.setattr(QualityBench, "_measure", counted)
        with bench_of(model, tokenizer, "reuse", "none/heads", out=tmp_path) as bench:
            bench.prepare(cases, progress=False)
            again = bench.run(cases, progress=False)
        assert calls == [2]
        assert list(again.results[:2]) == list(first.results)
        assert again.results[2].order == ("reuse", "none/heads")  # as if it had not been interrupted
        with bench_of(model, tokenizer, "reuse", out=tmp_path) as bench:  # another configuration
            bench.run(cases[:1], progress=False)
        assert calls == [2, 0] and len(list(tmp_path.glob("cases-*.jsonl"))) == 2

    def test_an_interruption_keeps_what_was_finished(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        cases: list[Case],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        measure = QualityBench._measure

        def interrupted(
            self: QualityBench, case: Case, key: str, ids: list[int], number: int, *more: Any
        ) -> CaseResult:
            if number == 1:
                raise KeyboardInterrupt
            return measure(self, case, key, ids, number, *more)

        monkeypatch.setattr(QualityBench, "_measure", interrupted)
        with bench_of(model, tokenizer, "reuse", out=tmp_path) as bench, pytest.raises(KeyboardInterrupt):
            bench.run(cases, progress=False)
        (file,) = tmp_path.glob("cases-*.jsonl")
        assert [json.loads(line)["case_id"] for line in file.read_text().splitlines()] == ["0"]

    def test_a_line_that_was_cut_short_is_dropped(self, report: QualityReport, tmp_path: Path) -> None:
        journal = Journal(tmp_path, {"a": 1})
        for result in report.results[:2]:
            journal.append(result)
        whole = journal.path.read_bytes()
        for cut in (1, 40):
            journal.path.write_bytes(whole[:-cut])
            again = Journal(tmp_path, {"a": 1})
            assert list(again.results.values()) == [report.results[0]]
            again.append(report.results[1])
            assert journal.path.read_bytes() == whole
        assert Journal(tmp_path, {"a": 2}).results == {}

    def test_results_survive_json(self, report: QualityReport) -> None:
        for result in report.results:
            assert CaseResult.from_json(json.loads(json.dumps(asdict(result)))) == result

    def test_code_is_part_of_the_configuration(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert code_digest() == code_digest() and len(code_digest()) == 64
        before = configuration_of(model, tokenizer, asked=1)
        assert configuration_of(model, tokenizer, asked=1) == before != configuration_of(model, tokenizer, asked=2)
        monkeypatch.setattr(journal, "code_digest", lambda: "of other code")
        assert configuration_of(model, tokenizer, asked=1) != before

    def test_code_that_only_shows_results_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for shown in journal._PRESENTATION:
            assert list(journal._PACKAGE.glob(f"{shown}*")), shown
        monkeypatch.setattr(journal, "_PACKAGE", tmp_path)
        page, engine = tmp_path / "evaluation" / "speed" / "page.py", tmp_path / "engine.py"
        page.parent.mkdir(parents=True)
        digests = []
        for changed in (engine, page, engine):
            with changed.open("a", encoding="utf-8") as file:
                file.write("# more\n")
            digests.append(code_digest())
        assert digests[0] == digests[1] != digests[2]


class TestReport:
    def test_lines(self, report: QualityReport) -> None:
        assert list(report.groups) == ["toy", "toy/unanswerable", "copy"]
        names = [line.name for line in report.groups["toy"]]
        assert names == ["full prefill", "full again", "r = 1", *POLICIES]

    def test_numbers_are_those_of_the_cases(self, report: QualityReport) -> None:
        reuse = report.groups["toy"][-2]
        kls = [r.policies["reuse"].fidelity.kl for r in report.results[:3] if r.policies["reuse"].fidelity]
        published = [
            r.policies["published"].fidelity.kl for r in report.results[:3] if r.policies["published"].fidelity
        ]
        assert reuse.kl is not None and reuse.kl.estimate == pytest.approx(sum(kls) / 3)
        assert reuse.kl_to_published is not None
        assert reuse.kl_to_published.estimate == pytest.approx(sum(kls) / sum(published))
        gains = [r.full.ttft_s / r.policies["reuse"].ttft_s for r in report.results[:3]]
        assert reuse.gain.estimate == pytest.approx(sum(gains) / 3) and reuse.median_gain == sorted(gains)[1]

    def test_abstentions_and_scores(self, report: QualityReport) -> None:
        def answering(result: CaseResult, name: str, **changes: Any) -> CaseResult:
            one = result.full if name == "full" else result.policies[name]
            assert one.answer is not None
            one = replace(one, answer=replace(one.answer, **changes))
            return (
                replace(result, full=one)
                if name == "full"
                else replace(result, policies={**result.policies, name: one})
            )

        first, second, third, without, copy = report.results
        said = [
            answering(answering(first, "full", f1=1.0), "reuse", f1=0.5),
            answering(answering(second, "full", f1=0.25), "reuse", f1=1.0, abstains=True),
            answering(answering(third, "full", abstains=True, f1=0.0), "reuse", abstains=True, f1=0.0),
            answering(answering(without, "full", abstains=True), "reuse", abstains=False),
            answering(copy, "reuse", verbatim=0.5),
        ]
        groups = QualityReport(said, {}, []).groups
        toy, unanswered, copied = (
            next(line for line in groups[group] if line.name == "reuse")
            for group in ("toy", "toy/unanswerable", "copy")
        )
        assert toy.false_abstentions == (1, 2) and toy.lost_abstentions is None
        assert toy.f1 is not None and toy.f1.estimate == pytest.approx(0.5)
        assert toy.f1_gain is not None and toy.f1_gain.estimate == pytest.approx(0.5 - 1.25 / 3)
        assert toy.f1_where_full_is_right is not None and toy.f1_where_full_is_right.estimate == 0.5
        assert unanswered.lost_abstentions == (1, 1) and unanswered.f1 is None
        assert copied.verbatim is not None and copied.verbatim.estimate == 0.5

    def test_files(self, report: QualityReport, tmp_path: Path) -> None:
        paths = report.write(tmp_path / "new")
        assert [path.name for path in paths] == ["quality.json", "quality.md"]
        data = json.loads(paths[0].read_text("utf-8"))
        assert data["groups"]["toy"]["summaries"][4]["kl"]["low"] > 0
        assert [policy["name"] for policy in data["policies"]] == list(POLICIES)
        assert {"model", "dtype", "device", "threads", "torch", "transformers", "date"} <= set(data["environment"])
        text = paths[1].read_text("utf-8")
        low, _, high = report.prompt_lengths("toy")
        assert f"n = 3; prompts of {low} to {high} tokens" in text
        rows = [line for line in text.splitlines() if line.startswith("| reuse |")]
        assert len(rows) == 3

    def test_what_is_undefined_is_null(self, report: QualityReport) -> None:
        exact = replace(
            report.results[0].policies["published"], fidelity=report.results[0].policies["published"].fidelity
        )
        assert exact.fidelity is not None
        exact = replace(exact, fidelity=replace(exact.fidelity, kl=0.0))
        result = replace(report.results[0], policies={**report.results[0].policies, "published": exact})
        data = json.loads(QualityReport([result], {}, []).to_json())
        assert data["groups"]["toy"]["summaries"][4]["kl_to_published"] == {"estimate": None, "low": None, "high": None}
        assert "| - |" in QualityReport([result], {}, []).to_markdown()

    def test_plots(self, report: QualityReport, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        paths = draw_plots(report, tmp_path)
        assert [path.name for path in paths] == ["quality-recompute.png", "quality-ttft.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
        assert paths[0].read_bytes() != paths[1].read_bytes()


class TestArguments:
    @pytest.mark.parametrize("names", [(), ("reuse", "reuse")])
    def test_policies_need_names_of_their_own(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, names: tuple[str, ...]
    ) -> None:
        with pytest.raises(ValueError, match="names of their own"):
            bench_of(model, tokenizer, *names)

    def test_answers_need_a_token(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ValueError, match="max_new_tokens"):
            QualityBench(model, tokenizer, None, [Policy.parse("reuse")], max_new_tokens=0)

    def test_a_case_that_does_not_fit_is_named_before_anything_is_stored(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case], tmp_path: Path
    ) -> None:
        long = replace(cases[1], passages=cases[1].passages * 20)
        with QualityBench(model, tokenizer, tmp_path, [Policy.parse("reuse")]) as bench:
            with pytest.raises(PromptTooLongError, match=r"case '1' of toy takes .* context window is 4096"):
                bench.prepare([cases[0], long], progress=False)
        with BlendEngine(model, tokenizer, tmp_path, prime="none") as engine:
            assert engine.num_chunks == 0
