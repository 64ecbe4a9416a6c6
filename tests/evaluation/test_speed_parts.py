"""What the speed benches are made of: times, texts, a slow line, an ideal, rounds on disk."""

from __future__ import annotations

import json
import mmap
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rag_blend.evaluation import Case, Passage
from rag_blend.evaluation.speed import gpu
from rag_blend.evaluation.speed.contestants import FullPrefill, PrefixCached
from rag_blend.evaluation.speed.ideal import ideal_seconds
from rag_blend.evaluation.speed.memory import forget_peak, peak_bytes
from rag_blend.evaluation.speed.report import Line, Panel, SpeedReport, View, number, text
from rag_blend.evaluation.speed.rounds import Round, run_rounds
from rag_blend.evaluation.speed.texts import Texts
from rag_blend.evaluation.speed.throttled import Link, Read, ThrottledBackend
from rag_blend.evaluation.speed.timing import grouped, in_turns, percentile, summary, timed

pytest_plugins = ["toy_collection"]

KEY = "ab" * 32


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def link(self, rate: float, latency_s: float = 0.0) -> Link:
        return Link(rate, latency_s, lambda: self.now, self.sleep)


class TestTiming:
    def test_a_call_is_timed(self) -> None:
        run = timed(lambda: sum(range(1000)))
        assert run.value == 499500 and run.wall_s > 0 and run.cpu_s >= 0

    def test_a_gpu_is_waited_for_before_and_behind_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        happened: list[str] = []
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: happened.append("waited"))
        timed(lambda: happened.append("called"))
        assert happened == ["waited", "called", "waited"]

    def test_each_is_first_once(self) -> None:
        assert [in_turns("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
        assert sorted(in_turns("abc", 2)) == ["a", "b", "c"]

    def test_summary_counts_runs_that_lost_cores(self) -> None:
        told = summary([1.0, 2.0, 1.2], [2.0, 2.0, 2.2])
        assert (told["median_s"], told["min_s"], told["max_s"], told["median_cpu_s"]) == (1.2, 1.0, 2.0, 2.0)
        assert told["lost"] == 1 and told["cpus"] == pytest.approx(2.2 / 1.2)

    def test_percentile(self) -> None:
        values = [float(v) for v in range(20, 0, -1)]
        assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 10.0, 19.0, 20.0]
        assert percentile([7.0], 0.95) == 7.0

    def test_groups_keep_their_order(self) -> None:
        samples = [{"a": 2, "n": 1}, {"a": 1, "n": 2}, {"a": 2, "n": 3}]
        assert [(key, [s["n"] for s in some]) for key, some in grouped(samples, "a")] == [((2,), [1, 3]), ((1,), [2])]


class TestLink:
    def test_bytes_go_one_after_the_other_and_arrive_a_latency_later(self) -> None:
        time = FakeTime()
        link = time.link(1000.0, latency_s=0.5)
        link.carry(2000)
        assert time.now == pytest.approx(102.5)
        link.carry(1000)  # the line has been free since 102
        assert time.now == pytest.approx(104.0)
        time.now = 110.0
        link.carry(0)
        assert time.now == pytest.approx(110.5)

    def test_readers_share_it_whoever_sleeps(self) -> None:
        waits: list[float] = []
        link = Link(1000.0, 0.0, lambda: 0.0, waits.append)  # all ask at the same moment
        threads = [threading.Thread(target=link.carry, args=(500,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(waits) == [pytest.approx(0.5 * (n + 1)) for n in range(8)]

    @pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -0.1)])
    def test_what_is_no_line(self, rate: float, latency: float) -> None:
        with pytest.raises(ValueError, match="positive rate"):
            Link(rate, latency)


class TestThrottledBackend:
    def test_reads_are_recorded_slowed_and_replayed(self) -> None:
        time, backend = FakeTime(), ThrottledBackend()
        backend.write(KEY, b"x" * 3000)
        with backend.open(KEY) as reader:
            assert bytes(reader.read(0, 10)) == b"x" * 10
        assert time.now == 100.0 and backend.reads == [Read(KEY, 0, 10)]
        backend.through = time.link(1000.0)
        backend.replay([Read(KEY, 0, 1000), Read(KEY, 1000, 2000)])
        assert time.now >= 103.0 and len(backend.reads) == 3

    def test_writing_is_not_slowed(self) -> None:
        time, backend = FakeTime(), ThrottledBackend()
        backend.through = time.link(1.0)
        backend.write(KEY, b"x" * 3000)
        assert time.now == 100.0


class TestTexts:
    def test_random_words_have_the_wanted_length_and_differ(self, tokenizer: PreTrainedTokenizerFast) -> None:
        chunks = Texts(tokenizer, 40).chunks(5)
        assert len(set(chunks)) == 5 and chunks == Texts(tokenizer, 40).chunks(5)
        assert chunks != Texts(tokenizer, 40, seed=1).chunks(5)
        for ids in tokenizer(chunks, add_special_tokens=False)["input_ids"]:
            assert 36 <= len(ids) <= 44  # cut words are spelled with more tokens

    def test_no_chunk_is_lost_between_two_calls(self, tokenizer: PreTrainedTokenizerFast) -> None:
        whole, parts = Texts(tokenizer, 40), Texts(tokenizer, 40)
        assert whole.chunks(4) == [*parts.chunks(1), *parts.chunks(3)]

    def test_own_texts_in_their_order(self, tokenizer: PreTrainedTokenizerFast, cases: list[Case]) -> None:
        texts = Texts(tokenizer, 32, cases)
        assert texts.source == "toy"
        first = cases[0].passages[0].prompt_text
        assert first.startswith(texts.chunks(1)[0][:20])
        assert [texts.question() for _ in cases] == [case.question for case in cases]
        with pytest.raises(ValueError, match="too few questions"):
            texts.question()
        with pytest.raises(ValueError, match="toy: too little text"):
            texts.chunks(10_000)

    def test_a_prompt_holds_its_chunks(self, tokenizer: PreTrainedTokenizerFast) -> None:
        texts = Texts(tokenizer, 32)
        chunks, question = texts.chunks(2), texts.question()
        prompt = texts.prompt(chunks, question)
        assert "\n\n".join(chunks) in prompt and question in prompt

    def test_a_chunk_that_could_not_be_found(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ValueError, match="16 tokens or more"):
            Texts(tokenizer, 15)


class TestContestants:
    def test_a_prefix_cache_is_exact_and_computes_the_rest_only(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        texts = Texts(tokenizer, 32)
        chunks, others = texts.chunks(2), texts.chunks(2)
        prompts = [texts.prompt(chunks, "one river?"), texts.prompt(chunks, "no stone?"), texts.prompt(others, "one?")]
        full, cached = FullPrefill(model, tokenizer), PrefixCached(model, tokenizer)
        rows = []
        for prompt in [prompts[0], *prompts, prompts[0]]:
            wanted, got = full.first_token(prompt), cached.first_token(prompt)
            torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
            assert got.token_id == wanted.token_id and got.prompt_tokens == wanted.prompt_tokens == wanted.rows
            rows.append(got.rows)
        total = wanted.prompt_tokens
        assert rows[0] == total and rows[1] == 1 < rows[2] < 60 < rows[3]
        cached.forget()
        assert cached.first_token(prompts[0]).rows == total


class TestIdeal:
    @pytest.mark.parametrize("rows", [40, 7])
    def test_the_layers_own_linear_modules_run_once_each_on_so_many_rows(
        self, model: PreTrainedModel, rows: int
    ) -> None:
        seen: list[int] = []
        linears = [part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        handles = [part.register_forward_hook(lambda _, args, out: seen.append(len(args[0]))) for part in linears]
        try:
            alone = ideal_seconds(model, rows, 40)
        finally:
            for handle in handles:
                handle.remove()
        assert alone is not None and alone.wall_s > 0
        assert seen == [rows] * (len(linears) - 1) + [1]  # the output head last

    def test_not_for_a_mixture_of_experts(self) -> None:
        assert ideal_seconds(random_model("qwen3_moe"), 4, 8) is None


def test_peak_memory_of_the_process() -> None:
    if not forget_peak():
        pytest.skip("this system does not let a process reset its peak")
    before = peak_bytes()
    with mmap.mmap(-1, 64_000_000) as taken:  # never memory that the process has already
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert peak_bytes() - before > 50_000_000
    forget_peak()
    assert peak_bytes() < before + 32_000_000


class TestRounds:
    def test_a_run_resumes_and_asks_for_nothing_twice(self, tmp_path: Path) -> None:
        measured: list[int] = []

        def prepare(stack: ExitStack) -> Round:
            def measure(turn: int) -> list[dict[str, Any]]:
                if turn == 2 and 2 not in measured:
                    measured.append(turn)
                    raise KeyboardInterrupt
                measured.append(turn)
                return [{"turn": turn}]

            return measure

        with pytest.raises(KeyboardInterrupt):
            run_rounds(tmp_path, {"a": 1}, 3, prepare, progress=False)
        assert run_rounds(tmp_path, {"a": 1}, 3, prepare, progress=False) == [{"turn": turn} for turn in range(3)]
        assert measured == [0, 1, 2, 2]
        run_rounds(tmp_path, {"a": 1}, 3, pytest.fail, progress=False)  # nothing to prepare
        run_rounds(tmp_path, {"a": 2}, 1, prepare, progress=False)
        assert measured == [0, 1, 2, 2, 0]

    def test_what_is_opened_is_closed(self, tmp_path: Path) -> None:
        closed: list[str] = []

        def prepare(stack: ExitStack) -> Round:
            stack.callback(closed.append, "yes")
            return lambda turn: []

        run_rounds(tmp_path, {}, 1, prepare, progress=False)
        assert closed == ["yes"]


class TestReport:
    VIEW = View(
        name="toy",
        title="Toy",
        notes="Notes.\n",
        section=lambda row: row["kind"],
        columns=[("", text("name")), ("s", number("s", ".1f", " s")), ("never", number("never", "d"))],
        panels=lambda rows: [Panel("t", "x", "y", [Line("l", [1.0], [2.0])])],
    )

    def test_tables_leave_out_what_is_empty(self) -> None:
        rows = [{"kind": "b", "name": "one", "s": 1.0}, {"kind": "a", "name": "two", "s": None, "never": 3}]
        report = SpeedReport(self.VIEW, {"cpu": "c"}, {"rounds": 2}, rows)
        assert report.tables() == {"b": [["", "s"], ["one", "1.0 s"]], "a": [["", "never"], ["two", "3"]]}
        page = report.to_markdown()
        assert page.startswith("# Toy\n\nNotes.\n") and "- cpu: c\n- rounds: 2\n" in page and "## b" in page

    def test_json_has_no_nan(self, tmp_path: Path) -> None:
        report = SpeedReport(self.VIEW, {}, {}, [{"kind": "a", "name": "n", "s": float("nan")}])
        assert [path.name for path in report.write(tmp_path / "new")] == ["toy.json", "toy.md"]
        data = json.loads((tmp_path / "new" / "toy.json").read_text("utf-8"))
        assert data == {
            "bench": "toy", "environment": {}, "settings": {}, "rows": [{"kind": "a", "name": "n", "s": None}],
        }  # fmt: skip


def test_passages_that_occur_twice_are_used_once(tokenizer: PreTrainedTokenizerFast) -> None:
    passage = Passage("the river and the mountain of the old town " * 4)
    cases = [Case(str(i), "qa", f"{i}?", ("x",), (passage,), dataset="twice") for i in range(2)]
    texts = Texts(tokenizer, 32, cases)
    num_tokens = len(tokenizer(passage.prompt_text, add_special_tokens=False)["input_ids"])
    with pytest.raises(ValueError, match="too little"):
        texts.chunks(num_tokens // 32 + 2)


def test_peak_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert gpu.peak_bytes() is None
    forgotten: list[bool] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: forgotten.append(True))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 7)
    gpu.forget_peak()
    assert forgotten and gpu.peak_bytes() == 7
