"""The shadow check: it measures what it says, never gets in the way, and stops when it is told to."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_model, small_tokenizer
from test_calibration import VERDICT

from rag_blend import BlendEngine, DriftReport
from rag_blend.divergence import agreement, kl
from rag_blend.errors import GenerationCancelledError
from rag_blend.runner import BlendPolicy
from rag_blend.shadow import ShadowChecker, ShadowQuery
from rag_blend.teacher import forced_logits

MakeEngine = Callable[..., BlendEngine]
POLICY = BlendPolicy.of("none", None)
QUERY = ShadowQuery(np.arange(4, dtype=np.int32), POLICY, [1, 2])
SAME = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
OTHER = torch.tensor([[1.0, 0.0], [1.0, 0.0]])


def eventually(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def finished(checker: ShadowChecker) -> bool:
    return checker._thread is None


def settled(engine: BlendEngine) -> DriftReport:
    eventually(lambda: finished(engine._shadow))
    return engine.drift()


class Model:
    """Stands in for the engine: full prefill says `SAME`, the blended one what it is told to."""

    def __init__(self, blended: torch.Tensor | None = OTHER) -> None:
        self.blended = blended
        self.lock = threading.RLock()
        self.calls: list[bool] = []

    def logits_of(self, query: ShadowQuery, policy: BlendPolicy, stop: threading.Event) -> torch.Tensor | None:
        self.calls.append(policy.reuse)
        return self.blended if policy.reuse else SAME


@pytest.fixture
def checker_of() -> Iterator[Callable[..., ShadowChecker]]:
    checkers: list[ShadowChecker] = []

    def make(model: Model, share: float = 1.0, target: tuple[float, float] = (10.0, 0.0)) -> ShadowChecker:
        checkers.append(ShadowChecker(share, model.lock, model.logits_of, lambda: target))
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.close()


CheckerOf = Callable[..., ShadowChecker]


class TestChecker:
    def test_it_reports_what_it_measured(self, checker_of: CheckerOf) -> None:
        model = Model()
        checker = checker_of(model)
        assert math.isnan(checker.report().mean_kl) and checker.report().num_checked == 0
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        model.blended = SAME
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        expected = float(kl(SAME, OTHER).mean())
        found = checker.report()
        assert (found.num_checked, found.num_dropped) == (2, 0) and found.seconds > 0
        assert found.mean_kl == pytest.approx(expected / 2) and found.worst_kl == pytest.approx(expected)
        assert found.agreement == pytest.approx((0.5 + 1.0) / 2)
        assert model.calls == [True, False, True, False]

    def test_the_share_is_exact(self, checker_of: CheckerOf) -> None:
        checker = checker_of(Model(), 0.25)
        counts = []
        for _ in range(12):
            checker.offer(QUERY)
            eventually(lambda: finished(checker))
            counts.append(checker.report().num_checked)
        assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]

    def test_nothing_at_zero(self, checker_of: CheckerOf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading, "Thread", None)  # would be called
        checker = checker_of(Model(), 0.0)
        for _ in range(100):
            checker.offer(QUERY)
        assert checker.report().num_checked == checker.report().num_dropped == 0

    @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
    def test_the_share_is_checked(self, share: float, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="shadow must lie between 0 and 1"):
            make_engine(shadow=share)

    def test_what_has_no_room_is_dropped_and_counted(self, checker_of: CheckerOf) -> None:
        model = Model()
        checker = checker_of(model)
        with model.lock:  # somebody is using the model
            checker.offer(QUERY)
            eventually(lambda: not checker._waiting)  # the thread has taken it and waits for the model
            for _ in range(4 + 3):
                checker.offer(QUERY)
            assert checker.report().num_dropped == 3 and not model.calls
        eventually(lambda: finished(checker))
        assert (checker.report().num_checked, checker.report().num_dropped) == (1 + 4, 3)

    def test_the_model_is_given_back_between_the_two_prefills(self, checker_of: CheckerOf) -> None:
        model = Model()
        checker = checker_of(model)
        released: list[int] = []

        class Lock:
            def acquire(self, blocking: bool) -> bool:
                assert not blocking  # whoever waits for an answer comes first
                return True

            def release(self) -> None:
                released.append(len(model.calls))

        checker._model_lock = Lock()  # type: ignore[assignment]
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        assert released == [1, 2]

    def test_an_error_is_logged_and_the_next_check_runs(
        self, checker_of: CheckerOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Model()

        def fail(*_: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        checker = ShadowChecker(1.0, model.lock, fail, lambda: (1.0, 0.0))
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        assert "a shadow check failed: out of memory" in caplog.text
        checker._logits_of = model.logits_of
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        assert (checker.report().num_checked, checker.report().num_dropped) == (1, 1)
        assert model.lock.acquire(blocking=False)

    def test_no_thread_to_be_had(
        self, checker_of: CheckerOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        checker = checker_of(Model())

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            checker.offer(QUERY)
        assert checker.report().num_dropped == 1 and "can't start new thread" in caplog.text
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        assert checker.report().num_checked == 1

    def test_a_prompt_that_cannot_be_blended_any_more_is_dropped(self, checker_of: CheckerOf) -> None:
        model = Model(blended=None)
        checker = checker_of(model)
        checker.offer(QUERY)
        eventually(lambda: finished(checker))
        assert (checker.report().num_checked, checker.report().num_dropped) == (0, 1)
        assert model.calls == [True]  # and full prefill is not computed for nothing

    @pytest.mark.parametrize(
        ("target", "warns"),
        [((10.0, 0.0), False), ((10.0, 0.6), True), ((0.11, 0.0), True), ((0.12, 0.0), False)],
    )  # the KL is 0.231, and twice the target is allowed; the agreement is 0.5
    def test_drift_is_warned_about_once(
        self, target: tuple[float, float], warns: bool, checker_of: CheckerOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        checker = checker_of(Model(torch.tensor([[1.0, 0.0], [1.0, 0.0]])), target=target)
        caplog.set_level(logging.WARNING)
        for number in range(1, 11):
            checker.offer(QUERY)
            eventually(lambda: finished(checker))
            assert caplog.text.count("drifted from full prefill") == (warns and number >= 8)

    def test_close_while_the_model_is_in_use_elsewhere(self, checker_of: CheckerOf) -> None:
        model = Model()
        checker = checker_of(model)
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with model.lock:
                holding.set()
                done.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        holding.wait(20)
        for _ in range(3):
            checker.offer(QUERY)
        started = time.monotonic()
        checker.close()
        assert time.monotonic() - started < 5 and not model.calls
        done.set()
        holder.join()
        checker.offer(QUERY)
        assert finished(checker) and checker.report().num_dropped == 3

    def test_close_stops_a_check_that_runs(self, checker_of: CheckerOf) -> None:
        model = Model()
        began = threading.Event()

        def slow(query: ShadowQuery, policy: BlendPolicy, stop: threading.Event) -> torch.Tensor:
            began.set()
            if stop.wait(20):
                raise GenerationCancelledError("stopped")
            return SAME

        checker = ShadowChecker(1.0, model.lock, slow, lambda: (1.0, 0.0))
        checker.offer(QUERY)
        assert began.wait(20)
        started = time.monotonic()
        checker.close()
        assert time.monotonic() - started < 5 and finished(checker)
        assert checker.report().num_checked == 0


def prompt_of(texts: list[str]) -> str:
    return "\n\n".join(texts) + "\n\nwhich river?"


class TestEngine:
    def test_it_measures_the_answer_that_was_given(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(selector="none", recompute_ratio=None, shadow=1.0)
        engine.ingest(texts, progress=False)
        answer = engine.generate(prompt_of(texts), 6, do_sample=False)
        found = settled(engine)
        blended, full = (
            forced_logits(engine._model, engine.prefill(prompt_of(texts), reuse=reuse), answer.token_ids)
            for reuse in (True, False)
        )
        assert (found.num_checked, found.num_dropped) == (1, 0)
        assert found.mean_kl == pytest.approx(float(kl(full, blended).mean()), rel=1e-3) and found.mean_kl > 1e-5
        assert found.agreement == pytest.approx(agreement(full, blended))

    def test_recomputing_everything_shows_no_drift(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, progress=False)
        engine.generate(prompt_of(texts), 6, recompute_ratio=1.0)  # the call's policy counts, not the engine's
        found = settled(engine)
        assert found.num_checked == 1 and found.worst_kl < 1e-5 and found.agreement == 1.0

    def test_streams_are_checked_too(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, progress=False)
        stream = engine.stream(prompt_of(texts), 4)
        list(stream)
        assert settled(engine).num_checked == 1

    def test_long_answers_are_compared_in_part(
        self, make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, progress=False)
        offered: list[ShadowQuery] = []
        monkeypatch.setattr(engine._shadow, "offer", offered.append)
        answer = engine.generate(prompt_of(texts), 80, min_new_tokens=80)
        assert len(answer.token_ids) == 80 and offered[0].answer_ids == answer.token_ids[:64]

    def test_full_prefill_is_not_compared_with_itself(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(shadow=1.0)
        engine.generate(prompt_of(texts), 2)
        engine.ingest(texts, progress=False)
        engine.generate(prompt_of(texts), 2, reuse=False)
        engine.prefill(prompt_of(texts))  # no answer
        found = settled(engine)
        assert (found.num_checked, found.num_dropped) == (0, 0)

    def test_a_forgotten_chunk_is_no_result(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, doc_ids=["a"] * len(texts), progress=False)
        with engine._lock:  # the check cannot begin before the chunks are gone
            engine.generate(prompt_of(texts), 2)
            engine.forget(["a"])
        found = settled(engine)
        assert (found.num_checked, found.num_dropped) == (0, 1)

    def test_errors_never_reach_the_caller(
        self, make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, progress=False)
        monkeypatch.setattr("rag_blend.engine.forced_logits", lambda *_: 1 / 0)
        answers = [engine.generate(prompt_of(texts), 3).token_ids for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert settled(engine).num_dropped == 3

    def test_answers_are_the_same_with_it(self, make_engine: MakeEngine, texts: list[str]) -> None:
        plain, shadowed = make_engine(), make_engine(shadow=1.0)
        for engine in (plain, shadowed):
            engine.ingest(texts, progress=False)
        for _ in range(4):
            expected = plain.generate(prompt_of(texts), 5, do_sample=False)
            assert shadowed.generate(prompt_of(texts), 5, do_sample=False).token_ids == expected.token_ids
        assert settled(shadowed).num_checked >= 1

    def test_close_stops_it_between_layers(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(shadow=1.0)
        engine.ingest(texts, progress=False)
        stop = threading.Event()
        stop.set()
        ids = np.asarray(engine.tokenizer(prompt_of(texts))["input_ids"], dtype=np.int32)
        for reuse in (True, False):
            policy = BlendPolicy.of("heads", None, reuse)
            with pytest.raises(GenerationCancelledError):
                engine._logits_along(ShadowQuery(ids, policy, [5]), policy, stop)
        engine.generate(prompt_of(texts), 2)
        engine.close()
        assert finished(engine._shadow)

    def test_the_target_is_the_verdicts(self, make_engine: MakeEngine) -> None:
        engine = make_engine(shadow=1.0)
        assert engine._shadow._target() == (0.02, 0.97)
        engine.adopt(replace(VERDICT, target_kl=0.5, target_agreement=0.6))
        assert engine._shadow._target() == (0.5, 0.6)

    def test_an_engine_that_is_dropped_is_freed(self, texts: list[str]) -> None:
        engine = BlendEngine(random_model(), small_tokenizer(), None, prime="none", shadow=1.0)
        engine.ingest(texts, progress=False)
        engine.generate(prompt_of(texts), 2)
        settled(engine)
        known = weakref.ref(engine)
        del engine
        gc.collect()
        assert known() is None
