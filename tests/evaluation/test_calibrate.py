"""Calibration on a random model: the cheapest candidate that passes, the verdict in the store, and the command."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import random_text
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from rag_blend import BlendEngine, PromptTooLongError
from rag_blend.cli import app
from rag_blend.evaluation import (
    Calibration,
    Candidate,
    Case,
    Passage,
    calibrate,
    cases_from_chunks,
    chunks_of,
    prompts,
)
from rag_blend.evaluation.calibrate import CANDIDATES
from rag_blend.storage.memory import MemoryBackend

pytest_plugins = ["toy_collection"]

NONE, RANDOM, MOST, ALL = (
    Candidate("none"),
    Candidate("random", 0.2),
    Candidate("random", 0.9),
    Candidate("all"),
)
Calibrate = Callable[..., Calibration]


@pytest.fixture(autouse=True)
def _blends_are_faster(ttfts: Callable[[float, float], None]) -> None:
    """Such small models compute prompts faster than they blend."""
    ttfts(1.0, 0.5)


@pytest.fixture
def run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[Case]) -> Calibrate:
    def calibrated(storage: Any = None, **options: Any) -> Calibration:
        options = {"candidates": (ALL, MOST, NONE, RANDOM), "max_new_tokens": 6, "prime": "none", **options}
        return calibrate(model, tokenizer, options.pop("cases", cases), storage, progress=False, **options)

    return calibrated


class TestChoice:
    def test_the_cheapest_is_tried_first_and_wins_when_it_passes(self, run: Calibrate) -> None:
        found = run(target_kl=100.0, target_agreement=0.0)
        assert [result.candidate for result in found.results] == [NONE]
        assert found.verdict.passed and (found.verdict.selector, found.verdict.ratio) == ("none", None)
        assert found.verdict.recompute_ratio == 0.0 and found.verdict.num_cases == 3

    def test_dearer_ones_are_tried_until_one_passes(self, run: Calibrate) -> None:
        everything = run(target_kl=0.0, target_agreement=1.0)
        kls = {result.candidate: result.kl.estimate for result in everything.results}
        assert kls[MOST] < kls[RANDOM]
        found = run(target_kl=(kls[MOST] + min(kls[RANDOM], kls[NONE])) / 2, target_agreement=0.0)
        assert [result.candidate for result in found.results] == [NONE, RANDOM, MOST]
        assert [result.passed for result in found.results] == [False, False, True]
        assert (found.verdict.selector, found.verdict.ratio) == ("random", 0.9)
        assert found.verdict.kl == found.results[-1].kl.estimate
        costs = [result.recompute_ratio for result in found.results]
        assert costs == sorted(costs) and costs[0] == 0.0 and costs[1] == pytest.approx(0.2, abs=0.02)

    def test_agreement_counts_as_well_as_kl(self, run: Calibrate) -> None:
        found = run(target_kl=100.0, target_agreement=1.0)
        assert len(found.results) > 1
        assert all(result.agreement.estimate < 1.0 for result in found.results[:-1])
        assert found.results[-1].agreement.estimate == 1.0

    def test_recomputing_everything_is_as_good_as_full_prefill(self, run: Calibrate) -> None:
        found = run(target_kl=1e-5, target_agreement=1.0)
        assert found.verdict.passed and found.verdict.selector == "all" and found.verdict.recompute_ratio == 1.0

    @pytest.mark.parametrize(("blend_s", "passed"), [(0.8, True), (1.0, False), (1.25, False)])
    def test_what_is_no_faster_than_full_prefill_does_not_pass(
        self, blend_s: float, passed: bool, run: Calibrate, ttfts: Callable[[float, float], None]
    ) -> None:
        ttfts(1.0, blend_s)
        found = run(target_kl=100.0, target_agreement=0.0, candidates=(NONE, RANDOM))
        assert found.verdict.passed == passed
        assert found.verdict.gain == pytest.approx(1 / blend_s)
        assert [result.passed for result in found.results] == ([True] if passed else [False, False])

    def test_nothing_passes(self, run: Calibrate) -> None:
        found = run(target_kl=1e-9, target_agreement=1.0, candidates=(RANDOM, NONE))
        assert len(found.results) == 2 and not any(result.passed for result in found.results)
        closest = min(found.results, key=lambda result: result.kl.estimate)
        verdict = found.verdict
        assert not verdict.passed
        assert Candidate(verdict.selector, verdict.ratio) == closest.candidate
        assert (verdict.kl, verdict.agreement) == (closest.kl.estimate, closest.agreement.estimate)
        assert (verdict.target_kl, verdict.target_agreement) == (1e-9, 1.0)

    def test_the_interval_is_around_the_mean(self, run: Calibrate) -> None:
        (result,) = run(target_kl=100.0, target_agreement=0.0).results
        assert 0.0 < result.kl.low <= result.kl.estimate <= result.kl.high
        assert result.kl.low < result.kl.high
        assert 0.0 <= result.agreement.low <= result.agreement.estimate <= result.agreement.high <= 1.0
        assert result.gain.estimate > 0.0

    def test_the_default_candidates_are_selectors_that_exist(self, run: Calibrate) -> None:
        found = run(target_kl=0.0, target_agreement=1.0, candidates=CANDIDATES)
        assert {result.candidate for result in found.results} == set(CANDIDATES)


class TestVerdict:
    def test_engines_on_the_store_follow_it(
        self, run: Calibrate, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        found = run(tmp_path, target_kl=100.0, target_agreement=0.0, namespace="mine")
        with BlendEngine(model, tokenizer, tmp_path, prime="none", namespace="mine") as engine:
            assert (engine.policy.selector, engine.policy.source) == ("none", "calibrated")
            assert engine._policies.verdict == found.verdict
        for other in ({"prime": "none"}, {"namespace": "mine", "prime": random_text(1)}):
            with BlendEngine(model, tokenizer, tmp_path, **other) as engine:
                assert engine.policy.source == "default"

    def test_a_failure_makes_them_prefill_in_full(
        self,
        run: Calibrate,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        cases: list[Case],
    ) -> None:
        storage = MemoryBackend()
        run(storage, target_kl=0.0, target_agreement=1.0, candidates=(NONE,))
        with BlendEngine(model, tokenizer, storage, prime="none") as engine:
            engine.ingest([p.prompt_text for p in cases[0].passages], prompts.head_ids(tokenizer), progress=False)
            ids = prompts.case_ids(tokenizer, cases[0])
            assert engine.prefill(ids).stats.mode == "full"
            assert engine.prefill(ids, selector="none").stats.mode == "blend"

    def test_engines_that_round_their_rows_follow_their_own(
        self, run: Calibrate, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        storage = MemoryBackend()
        run(storage, target_kl=100.0, target_agreement=0.0, codec="int8")
        for codec, source in (("int8", "calibrated"), ("int4", "default"), ("raw", "default")):
            with BlendEngine(model, tokenizer, storage, prime="none", codec=codec) as engine:
                assert engine.policy.source == source

    def test_an_earlier_verdict_does_not_bias_a_later_one(self, run: Calibrate) -> None:
        storage = MemoryBackend()
        assert not run(storage, target_kl=0.0, target_agreement=1.0, candidates=(NONE,)).verdict.passed
        assert run(storage, target_kl=1e-5, target_agreement=1.0, candidates=(ALL,)).verdict.passed

    @pytest.mark.parametrize("prime", ["none", "sample"])
    def test_nothing_else_stays_in_the_store(
        self,
        prime: str,
        run: Calibrate,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        tmp_path: Path,
    ) -> None:
        options = {"prime": prime, "prime_tokens": 16}
        with BlendEngine(model, tokenizer, tmp_path, **options) as engine:
            engine.ingest([random_text(seed) for seed in range(20, 26)], doc_ids=["mine"] * 6, progress=False)
            before = {key for key, *_ in engine._store.scan()}
        run(tmp_path, target_kl=100.0, target_agreement=0.0, **options)
        with BlendEngine(model, tokenizer, tmp_path, **options) as engine:
            added = {key for key, *_ in engine._store.scan()} - before
            assert len(added) <= 1  # the head's own rows, which every prompt may reuse exactly
            assert engine.num_chunks == 6 + len(added) and engine.policy.source == "calibrated"

    def test_only_passages_of_one_document_are_neighbours(
        self, run: Calibrate, cases: list[Case], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or prime="preceding" would be measured with texts that no document has in front of each other."""
        asked: list[list[str]] = []
        ingest = BlendEngine.ingest

        def noting(engine: BlendEngine, texts: Any, head: Any, doc_ids: list[str], **options: Any) -> Any:
            asked.append(doc_ids)
            return ingest(engine, texts, head, doc_ids, **options)

        monkeypatch.setattr(BlendEngine, "ingest", noting)
        first, second, *others = cases[0].passages
        own = (replace(first, document="2"), replace(second, document="2"), *others)  # "2" is not the third passage
        for passages in (cases[0].passages, own):
            run(target_kl=100.0, target_agreement=0.0, prime="preceding", cases=[replace(cases[0], passages=passages)])
        apart, together = asked
        assert len(set(apart)) == len(apart)
        assert together[0] == together[1] and len(set(together)) == len(together) - 1

    def test_an_error_leaves_no_verdict_and_no_chunks(
        self,
        run: Calibrate,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(BlendEngine, "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, target_kl=100.0, target_agreement=0.0)
        with BlendEngine(model, tokenizer, tmp_path, prime="none") as engine:
            assert engine.policy.source == "default" and engine.num_chunks <= 1

    def test_as_json(self, run: Calibrate) -> None:
        found = run(target_kl=0.0, target_agreement=1.0, candidates=(NONE, RANDOM))
        data = json.loads(found.to_json())
        assert data["verdict"]["passed"] is False and data["verdict"]["num_cases"] == 3
        assert [one["candidate"]["selector"] for one in data["results"]] == ["none", "random"]
        assert data["results"][0]["kl"]["low"] <= data["results"][0]["kl"]["estimate"]
        endless = replace(found, verdict=replace(found.verdict, kl=float("inf")))
        assert json.loads(endless.to_json())["verdict"]["kl"] is None


class TestArguments:
    @pytest.mark.parametrize(
        "wrong", [{"candidates": ()}, {"target_kl": -1.0}, {"target_agreement": 1.5}, {"target_agreement": -0.5}]
    )
    def test_nonsense_is_refused(self, wrong: dict[str, Any], run: Calibrate) -> None:
        with pytest.raises(ValueError, match="calibration needs candidates"):
            run(**wrong)

    def test_no_cases(self, run: Calibrate) -> None:
        with pytest.raises(ValueError, match="nothing to calibrate"):
            run(cases=[])

    def test_cases_without_reuse_are_left_out(
        self,
        run: Calibrate,
        cases: list[Case],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        caplog.set_level(logging.WARNING)
        for repeated in ("_CLOSING", "_ANSWER"):  # so few merges know this tokenizer that the head is found again
            monkeypatch.setattr(prompts, repeated, "\n")
        short = Case("short", "qa", "which river?", (), (Passage("the river"),))
        assert run(cases=[short, *cases], target_kl=100.0, target_agreement=0.0).verdict.num_cases == 3
        assert "case short is left out" in caplog.text
        with pytest.raises(ValueError, match="no case has a passage that can be reused"):
            run(cases=[short])

    def test_a_case_that_does_not_fit(self, run: Calibrate, cases: list[Case]) -> None:
        long = replace(cases[1], passages=cases[1].passages * 20)
        with pytest.raises(PromptTooLongError, match="case '1' of toy takes"):
            run(cases=[long])


class TestOwnChunks:
    def test_every_case_asks_about_one_of_its_passages(self) -> None:
        texts = [random_text(seed) for seed in range(12)]
        made = cases_from_chunks(texts, 5, 4, seed=3)
        assert len(made) == 5 and len({case.id for case in made}) == 5
        for case in made:
            (target,) = [passage for passage in case.passages if passage.supporting]
            assert len(case.passages) == len(set(case.passages)) == 4
            assert " ".join(target.text.split()[:8]) in case.question and case.answers == ()
            assert {passage.prompt_text for passage in case.passages} <= set(texts)
        assert made == cases_from_chunks(texts, 5, 4, seed=3) != cases_from_chunks(texts, 5, 4, seed=4)

    def test_titles_are_asked_for(self) -> None:
        (first, _) = cases_from_chunks(["# The old mill\nwater and stone", "# The new mill\nlight"], 2)
        assert first.question in {
            'What does the text say about "The old mill"?',
            'What does the text say about "The new mill"?',
        }

    def test_passages_are_those_that_resemble_the_chunk(self) -> None:
        texts = ["red green blue", "red green light", "north south winter", "north south summer"]
        for case in cases_from_chunks(texts, 4, 2):
            colours = {"red" in passage.text for passage in case.passages}
            assert len(colours) == 1, case

    def test_fewer_chunks_than_asked_for(self) -> None:
        assert len(cases_from_chunks(["one text", " one text ", "two texts"], 9, 9)) == 2
        with pytest.raises(ValueError, match="two different chunks"):
            cases_from_chunks(["one text", "one text\n", " "], 9)

    def test_documents_are_cut_at_blank_lines(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "b.md").write_text("# Title\n\none two\nthree\n\n\n  \nfour five six seven\n", encoding="utf-8")
        (tmp_path / "deep" / "a.TXT").write_text("x " * 12, encoding="utf-8")
        (tmp_path / "c.pdf").write_bytes(b"\xff\xff")
        assert chunks_of(tmp_path, 5) == [
            "# Title\n\none two\nthree",
            "four five six seven",
            "x x x x x",
            "x x x x x",
            "x x",
        ]

    def test_documents_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(NotADirectoryError, match="there is no directory"):
            chunks_of(tmp_path / "absent")
        with pytest.raises(ValueError, match=r"no text in \.txt or \.md files"):
            chunks_of(tmp_path)
        (tmp_path / "a.txt").write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 .*save it as UTF-8"):
            chunks_of(tmp_path)


def command(model_dir: Path, storage: Path, *more: object) -> Result:
    arguments = ["calibrate", "--model", model_dir, "--storage", storage, "--prime", "none", *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class TestCommand:
    def test_table_and_verdict(
        self,
        model_dir: Path,
        data_file: Path,
        tmp_path: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        storage = tmp_path / "kv"
        result = command(model_dir, storage, "--data", data_file, "--limit", 2, "--kl", 100, "--agreement", 0)
        assert result.exit_code == 0, result.output
        assert "2 prompts; target: KL at most 100, agreement at least 0" in result.stdout
        assert f"Engines on {storage} that have" in result.stdout
        with BlendEngine.from_pretrained(model_dir, storage, prime="none") as engine:
            assert engine.policy.source == "calibrated" and not engine.policy.full_prefill
            assert f"now use {engine.policy.selector}" in result.stdout

    def test_the_codec_is_that_of_the_engine(self, model_dir: Path, data_file: Path, tmp_path: Path) -> None:
        passing = ("--data", data_file, "--limit", 2, "--kl", 100, "--agreement", 0)
        assert command(model_dir, tmp_path, *passing, "--codec", "int8").exit_code == 0
        for codec, source in (("int8", "calibrated"), ("raw", "default")):
            with BlendEngine.from_pretrained(model_dir, tmp_path, prime="none", codec=codec) as engine:
                assert engine.policy.source == source
        unknown = command(model_dir, tmp_path, *passing, "--codec", "int3")
        assert unknown.exit_code == 2 and "unknown codec 'int3'; known: " in unknown.stderr

    def test_nothing_passes_on_ones_own_documents(self, model_dir: Path, tmp_path: Path) -> None:
        documents = tmp_path / "documents"
        documents.mkdir()
        text = "\n\n".join(random_text(seed, 200) for seed in range(4))
        (documents / "all.txt").write_text(text, encoding="utf-8")
        result = command(
            model_dir, tmp_path / "kv", "--documents", documents, "--limit", 2, "--kl", 0, "--agreement", 1, "--json"
        )
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["verdict"]["passed"] is False and len(data["results"]) == len(CANDIDATES)
        with BlendEngine.from_pretrained(model_dir, tmp_path / "kv", prime="none") as engine:
            assert engine.policy.full_prefill

    @pytest.mark.parametrize(
        ("more", "complaint"),
        [
            ([], "give either --data or --documents"),
            (["--data", "a.jsonl", "--documents", "b"], "give either --data or --documents"),
            (["--data", "absent.jsonl"], "absent.jsonl"),
            (["--documents", "absent"], "there is no directory 'absent'"),
            (["--data", "DATA", "--model", "absent"], "there is no model directory 'absent'"),
        ],
    )
    def test_a_mistake_is_one_line_and_exit_status_two(
        self, model_dir: Path, data_file: Path, tmp_path: Path, more: list[str], complaint: str
    ) -> None:
        given = [str(data_file) if word == "DATA" else word for word in more]
        result = command(model_dir, tmp_path / "kv", *given)
        assert result.exit_code == 2 and complaint in result.stderr
        assert result.stderr.count("\n") == 1 and not result.stdout
