"""The cost model: what it learns, what it declines, and how much recompute hides behind a fetch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_model
from test_engine_storage import prompt_with

from rag_blend import BlendEngine
from rag_blend.cache import BlendCache
from rag_blend.control import LONGEST_WAIT_S, Controller, ModelCost, PassTimes
from rag_blend.models import adapter_for
from rag_blend.plan import BlendPlan, Segment
from rag_blend.selectors import selector_of
from rag_blend.work import cost_of, expected_rows, timed_prefills

MakeEngine = Callable[..., BlendEngine]
COST = ModelCost(flops_per_row=2e8, flops_per_pair=1e5, num_layers=10)
OVERHEAD_S, FLOPS_PER_S = 0.08, 1e11
PLACES = {"a": "disk", "b": "disk", "c": "redis"}

pytestmark = pytest.mark.declines


def plan(num_tokens: int, *reused: int, exact: bool = False, kept: int = 0) -> BlendPlan:
    """Segments of these lengths from the chunks a, b, c, one behind the other."""
    starts = [kept + sum(reused[:i]) for i in range(len(reused))]
    segments = [
        Segment(start, start + length, key, 0, exact and key == "a")
        for start, length, key in zip(starts, reused, "abc", strict=False)
    ]
    return BlendPlan(num_tokens, tuple(segments), kept)


def work_of(candidate: BlendPlan) -> float:
    """With a tenth of the reusable tokens recomputed."""
    return COST.blend(candidate, 0.1 * len(candidate.reusable), 0.0)


def taught(fetches: Mapping[str, float] | None = None, overhead_s: float = OVERHEAD_S) -> Controller:
    """A controller that has seen a machine with these properties; `fetches` are seconds per 1,000 tokens."""
    controller = Controller(COST)
    for tokens in (64, 256, 1000, 2000):
        controller.learn_full(tokens, 0.02 + COST.prefill(tokens) / FLOPS_PER_S)
    for flops in 2 * [2.0**size for size in range(31, 40)]:
        controller.learn_blend(flops, overhead_s + flops / FLOPS_PER_S, [])
    for place, seconds in (fetches or {}).items():
        controller.learn_blend(0.0, 0.0, 2 * [(place, 1000, seconds)])
    return controller


class TestPassTimes:
    def test_what_was_seen_is_told_and_what_lies_between_is_interpolated(self) -> None:
        times = PassTimes()
        assert times.seconds(2**33) is None
        times.learn(2**33, 0.2)
        times.learn(2**35, 0.5)
        assert times.seconds(2**33) == pytest.approx(0.2)
        assert times.seconds(2.5 * 2**33) == pytest.approx(0.35)
        assert times.seconds(2**36) == pytest.approx(1.0)
        assert times.seconds(2**20) == pytest.approx(0.2)
        assert times.tells(0.6 * 2**33)
        assert not times.tells(0.4 * 2**33)  # how much was overhead, nobody knows
        assert times.tells(1.9 * 2**35)
        assert not times.tells(2.1 * 2**35)

    def test_a_hiccup_says_nothing(self) -> None:
        times = PassTimes()
        for seconds in (0.2, 9.0, 0.21, 0.22):
            times.learn(2**33, seconds)
        assert times.seconds(2**33) == pytest.approx(0.21)

    def test_it_follows_a_machine_that_slows_down(self) -> None:
        times = PassTimes()
        for seconds in (0.2, 0.2, 0.2, 0.6, 0.6, 0.6):
            times.learn(2**33, seconds)
        assert times.seconds(2**33) == pytest.approx(0.6)

    def test_untimed_and_empty_passes_teach_nothing(self) -> None:
        times = PassTimes()
        times.learn(1e10, 0.0)
        times.learn(0.0, 1.0)
        assert times.seconds(1e10) is None

    def test_the_first_of_anything_may_be_slow(self) -> None:
        times = PassTimes(at_least=2)
        times.learn(2**33, 3.0)
        assert times.seconds(2**33) is None
        times.learn(2**33, 0.2)
        assert times.seconds(2**33) == pytest.approx(0.2)

    def test_what_was_slow_once_gets_another_chance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forgetful, steady = PassTimes(memory_s=60.0), PassTimes()
        for times in (forgetful, steady):
            times.learn(2**33, 5.0)
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert forgetful.seconds(2**33) is None
        assert steady.seconds(2**33) == 5.0


class TestWhatIsReused:
    def test_everything_while_nothing_is_known(self) -> None:
        whole = plan(1000, 400, 400)
        assert Controller(COST).best(whole, PLACES, work_of) is whole

    def test_long_prompts_and_not_a_few_tokens_of_one(self) -> None:
        controller = taught({"disk": 0.05})
        assert controller.best(plan(2000, 900, 900), PLACES, work_of).reuses
        assert not controller.best(plan(2000, 100), PLACES, work_of).reuses

    def test_not_the_chunks_of_short_prompts(self) -> None:
        assert not taught(overhead_s=0.2).best(plan(60, 40), PLACES, work_of).reuses

    def test_a_slow_place_is_left_out_and_the_others_are_used(self) -> None:
        controller = taught({"disk": 0.05, "redis": 60.0})
        assert controller.best(plan(2000, 600, 600, 600), PLACES, work_of).keys == {"a", "b"}
        assert not controller.best(plan(2000, 600), {"a": "redis"}, work_of).reuses

    def test_only_what_is_exact_if_nothing_else_is_worth_it(self) -> None:
        controller = taught({"disk": 0.01})
        exact_first = plan(1000, 800, 16, exact=True)
        dear = 1e12  # whatever choosing among 16 tokens costs here

        def dear_work_of(candidate: BlendPlan) -> float:
            return work_of(candidate) + dear * bool(candidate.blended)

        assert [s.key for s in controller.best(exact_first, PLACES, dear_work_of).segments] == ["a"]

    def test_an_earlier_prompt_is_gone_on_from_if_that_is_worth_it(self) -> None:
        controller = taught({"redis": 60.0})
        best = controller.best(plan(2000, 600, kept=900), {"a": "redis"}, work_of)
        assert best.kept == 900 and not best.segments
        assert not controller.best(plan(2000, 600, kept=50), {"a": "redis"}, work_of).reuses
        assert not controller.best(plan(2000, kept=50), {}, work_of).reuses

    def test_what_computes_most_of_the_prompt_is_not_even_tried(self) -> None:
        controller = Controller(COST)
        controller.learn_full(1000, 1.0)
        assert not controller.best(plan(1000, 100), PLACES, work_of).reuses
        assert controller.best(plan(1000, 500), PLACES, work_of).reuses

    @pytest.mark.parametrize("share", [0.7, 0.001])
    def test_blends_of_another_size_say_nothing(self, share: float) -> None:
        controller = Controller(COST)
        controller.learn_full(1000, 1.0)
        for _ in range(3):
            controller.learn_blend(share * COST.prefill(1000), 1.5, [])
        assert controller.best(plan(1000, 400, 400), PLACES, work_of).reuses

    def test_whatever_is_possible_if_so_wanted(self) -> None:
        controller = taught({"redis": 60.0})
        controller.declines = Controller(COST, "possible").declines
        whole = plan(60, 40)
        assert controller.best(whole, {"a": "redis"}, work_of) is whole
        with pytest.raises(ValueError, match="'faster' or 'possible', not 'often'"):
            Controller(COST, "often")  # type: ignore[arg-type]


class TestSpareRows:
    def test_recompute_lasts_as_long_as_the_fetch(self) -> None:
        whole = plan(2000, 900, 900)
        assert taught({"disk": 0.001}).spare_rows(whole, PLACES, work_of) == 0
        controller = taught({"disk": 0.8}, overhead_s=0.0)
        spare = controller.spare_rows(whole, PLACES, work_of)
        seconds = (
            work_of(whole) + COST.blend(plan(2000, 1900), spare, 0.0) - COST.blend(plan(2000, 1900), 0, 0.0)
        ) / FLOPS_PER_S
        assert seconds == pytest.approx(0.8 * 1.8, rel=0.1)

    def test_none_while_nothing_is_known(self) -> None:
        assert Controller(COST).spare_rows(plan(2000, 900), PLACES, work_of) == 0


class TestWaiting:
    def test_a_store_is_waited_for_half_as_long_as_it_saves(self) -> None:
        assert Controller(COST).wait_for(1000) == LONGEST_WAIT_S
        controller = Controller(COST)
        controller.learn_full(1000, 1.0)
        assert controller.wait_for(1000) == pytest.approx(0.5)
        assert controller.wait_for(100_000) == LONGEST_WAIT_S

    def test_a_first_connection_has_a_chance(self) -> None:
        controller = Controller(COST)
        controller.learn_full(1000, 1e-4)
        assert 0.0 < controller.wait_for(1) < 0.1


class TestWork:
    @pytest.mark.parametrize("selector", ["heads", "none", "hkvd", "anchor", "probe", "random"])
    @pytest.mark.parametrize("ratio", [None, 0.3])
    def test_what_is_expected_is_what_is_done(
        self, selector: str, ratio: float | None, make_engine: MakeEngine
    ) -> None:
        model = random_model(num_hidden_layers=8)
        engine = make_engine(model=model, selector=selector, recompute_ratio=ratio, reuse_when="possible")
        texts = [" ".join(["river", "stone", "north", str(i)] * 30) for i in range(3)]
        engine.ingest(texts, progress=False)
        expected: list[float] = []
        done: list[float] = []

        def best(found: BlendPlan, places: Mapping[str, str], work_of: Callable[[BlendPlan], float]) -> BlendPlan:
            expected.append(work_of(found))
            return found

        def learn_blend(flops: float, seconds: float, fetches: Any) -> None:
            assert seconds > 0
            done.append(flops)

        engine._control.learn_blend, engine._control.best = learn_blend, best  # type: ignore[method-assign]
        engine.prefill(prompt_with(*texts))
        assert done == pytest.approx(expected, rel=0.1)

    def test_a_plan_without_reusable_tokens_needs_no_choice(self) -> None:
        assert expected_rows(plan(100, 50, exact=True), selector_of("anchor"), None, 10) == (0.0, 0.0)

    def test_a_models_own_sizes(self) -> None:
        model = random_model()
        adapter = adapter_for(model)
        cost = cost_of(adapter)
        in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
        assert cost == ModelCost(2.0 * in_layers, 4.0 * 2 * 4 * 16, 2)
        assert cost.blend(plan(100), 0, 0) == pytest.approx(cost.prefill(100))
        everything = replace(plan(100, 60), num_tokens=100)
        assert cost.blend(everything, 60, 0) == pytest.approx(cost.prefill(100))

    def test_prefills_are_timed(self) -> None:
        timed = list(timed_prefills(adapter_for(random_model())))
        assert [tokens for tokens, _ in timed] == [64, 256]
        assert all(seconds > 0 for _, seconds in timed)
        small = adapter_for(random_model(max_position_embeddings=128))
        assert [tokens for tokens, _ in timed_prefills(small)] == [64]

    def test_a_slow_machine_is_timed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[int] = []
        monkeypatch.setattr("rag_blend.work._time_of", lambda adapter, tokens: tried.append(tokens) or 20.0)
        assert list(timed_prefills(adapter_for(random_model()))) == [(64, 20.0)]
        assert tried == [64]


class TestEngine:
    def test_declined_chunks_are_counted_and_computed(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts)
        full = engine.prefill(prompt, reuse=False)
        engine._control._full = PassTimes()
        engine._control.learn_full(256, 1e-6)  # a machine that is faster than any store
        for flops in (1e6, 1e6, 1e9, 1e9):
            engine._control.learn_blend(flops, 1.0, [])
        declined = engine.prefill(prompt)
        assert torch.equal(declined.logits, full.logits)
        stats = declined.stats
        assert (stats.mode, stats.declined, stats.hits, stats.misses) == ("full", len(texts), 0, 0)
        assert stats.fresh_tokens == stats.prompt_tokens
        possible = make_engine(storage=engine._backend, reuse_when="possible").prefill(prompt)
        assert (possible.stats.mode, possible.stats.declined, possible.stats.hits) == ("blend", 0, len(texts))

    def test_a_store_that_turns_out_slow_is_left_alone(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        engine._control._full = PassTimes()
        engine._control.learn_full(256, 0.5)
        prompt = prompt_with(*texts)
        assert [engine.prefill(prompt).stats.hits for _ in range(2)] == 2 * [len(texts)]
        engine._control.learn_blend(0.0, 0.0, [("memory", 1, 10.0)] * 9)
        assert engine.prefill(prompt).stats.declined == len(texts)

    def test_a_slow_fetch_raises_the_ratio_only_where_it_is_free_to_choose(
        self, make_engine: MakeEngine, texts: list[str]
    ) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts)
        usual = max(engine.prefill(prompt).stats.recomputed_tokens for _ in range(2))
        engine._control._full = PassTimes()
        engine._control.learn_full(256, 5.0)
        engine._control.learn_blend(0.0, 0.0, [("memory", 1000, 1.0)] * 9)
        assert engine.prefill(prompt).stats.recomputed_tokens > 2 * usual
        engine._control.learn_blend(0.0, 0.0, [("memory", 1000, 1.0)] * 9)
        given = engine.prefill(prompt, recompute_ratio=0.1).stats
        assert given.recomputed_tokens <= 0.1 * (given.reused_tokens + given.recomputed_tokens) + 1

    def test_what_nobody_could_time_says_nothing_about_computing(
        self, make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An accelerator computes behind the clock's back: its blends must not look as if they took no time."""
        engine = make_engine()
        engine.ingest(texts, progress=False)
        monkeypatch.setattr(BlendCache, "prefill_s", 0.0)
        prompt = prompt_with(*texts)
        usual = [engine.prefill(prompt).stats.recomputed_tokens for _ in range(3)]
        engine._control.learn_blend(0.0, 0.0, [("memory", 1000, 1.0)] * 9)
        assert engine._control._blend.seconds(1e6) is None
        assert engine.prefill(prompt).stats.recomputed_tokens == usual[0]

    def test_where_the_bytes_come_from_never_changes_the_answer(
        self, make_engine: MakeEngine, texts: list[str]
    ) -> None:
        """Unless it may: `recompute_ratio="auto"` and `reuse_when="faster"` are the two that look at the time."""
        fast, slow = (make_engine(reuse_when="possible", recompute_ratio=0.1) for _ in range(2))
        prompt = prompt_with(*texts)
        for engine in (fast, slow):
            engine.ingest(texts, progress=False)
            engine.prefill(prompt)
        for _ in range(9):
            slow._control.learn_full(256, 1e-6)
            slow._control.learn_blend(1e8, 1.0, [("memory", 1, 60.0)])
        assert torch.equal(slow.prefill(prompt).logits, fast.prefill(prompt).logits)
