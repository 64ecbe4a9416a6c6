"""The cost model: what it learns, what it declines, and how much recompute hides behind a fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_model
from test_engine_storage import prompt_with

from rag_blend import BlendEngine
from rag_blend.cache import BlendCache
from rag_blend.control import LONGEST_WAIT_S, Backoff, Controller, ModelCost
from rag_blend.models import adapter_for
from rag_blend.plan import BlendPlan, Segment
from rag_blend.selectors import selector_of
from rag_blend.storage.memory import MemoryBackend
from rag_blend.times import PassTimes
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
        controller.learn_blend(0.0, 0.0, 2 * [(place, 1, 1000, seconds)])
    return controller


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

    def test_a_fast_blend_is_not_given_up_to_try_what_computes_more(self) -> None:
        """What is exact alone was never timed, but computes more than the blend, which was."""
        controller = Controller(COST)
        controller.learn_full(2000, 2.0)
        possible = plan(2000, 800, 500, 500, exact=True)
        for _ in range(3):
            controller.learn_blend(work_of(possible), 0.4, [])
        assert controller.best(possible, PLACES, work_of) is possible

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

    def test_a_slow_store_is_not_tried_with_every_size_of_prompt(self) -> None:
        """Nothing is known of a blend of this size, but fetching alone takes longer than computing."""
        controller = Controller(COST)
        controller.learn_full(1000, 1.0)
        controller.learn_blend(0.0, 0.0, 2 * [("disk", 1, 1000, 10.0)])
        assert not controller.best(plan(1000, 800), PLACES, work_of).reuses
        assert controller.best(plan(1000, 800), {"a": "memory"}, work_of).reuses

    def test_what_was_refused_is_tried_again(self) -> None:
        controller = taught({"redis": 60.0})
        whole = plan(2000, 900)
        chosen = [controller.best(whole, {"a": "redis"}, work_of) for _ in range(30)]
        assert [turn for turn, best in enumerate(chosen) if best is whole] == [4, 13]

    def test_trials_that_prove_fast_are_followed_by_others_until_it_is_known(self) -> None:
        controller = taught({"redis": 60.0})
        whole, places = plan(2000, 900), {"a": "redis"}
        while controller.best(whole, places, work_of) is not whole:
            pass
        for _ in range(6):
            computing_s = OVERHEAD_S + work_of(whole) / FLOPS_PER_S
            controller.learn_blend(work_of(whole), computing_s, [("redis", 1, 900, 0.01)])
            assert controller.best(whole, places, work_of) is whole
        assert controller._trial is None  # it is known by now

    def test_one_slow_place_does_not_keep_another_from_being_tried(self) -> None:
        controller = taught({"disk": 60.0, "redis": 60.0})
        for place in ("disk", "redis"):
            assert [controller.best(plan(2000, 900), {"a": place}, work_of).reuses for _ in range(5)] == [False] * 4 + [
                True
            ]


class TestBackoff:
    @staticmethod
    def tries(backoff: Backoff, cost: float, refusals: int) -> list[int]:
        return [number for number in range(1, refusals + 1) if backoff.refuse(cost)]

    def test_the_delay_doubles(self) -> None:
        assert self.tries(Backoff(), 10.0, 300) == [5, 14, 31, 64, 129, 258]

    @pytest.mark.parametrize("cost", [1.0, 1.3, 10.0, 1000.0])
    def test_in_the_long_run_tries_take_a_hundredth_of_the_time(self, cost: float) -> None:
        backoff = Backoff()
        self.tries(backoff, cost, 200_000)
        refusals = 300_000
        tries = len(self.tries(backoff, cost, refusals))
        assert 0.4 < tries * cost / (0.01 * refusals) <= 1.1

    def test_it_begins_anew_when_it_proved_fast(self) -> None:
        backoff = Backoff()
        self.tries(backoff, 10.0, 300)
        backoff.reset()
        assert self.tries(backoff, 10.0, 20) == [1, 6, 15]


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

    def test_none_in_a_trial(self) -> None:
        """They would make it as slow as the store is thought to be, even if that has become fast."""
        controller = taught({"redis": 60.0})
        whole, places = plan(2000, 900), {"a": "redis"}
        assert controller.spare_rows(whole, places, work_of) > 0
        while controller.best(whole, places, work_of) is not whole:
            pass
        assert controller.spare_rows(whole, places, work_of) == 0


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


def fetch_of(texts: list[str], seconds: float) -> tuple[str, int, int, float]:
    """All chunks of a prompt came from memory in so many seconds."""
    return "memory", len(texts), sum(len(text.split()) for text in texts), seconds


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

    def test_fetches_are_told_by_their_place_entries_and_tokens(
        self, make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[tuple[str, int, int, float]] = []
        monkeypatch.setattr(Controller, "learn_blend", lambda self, flops, seconds, fetches: told.extend(fetches))
        engine = make_engine(reuse_when="possible")
        engine.ingest(texts, progress=False)
        stats = engine.prefill(prompt_with(*texts)).stats
        ((place, entries, tokens, seconds),) = told
        assert (place, entries, tokens) == ("memory", len(texts), stats.reused_tokens + stats.recomputed_tokens)
        assert seconds > 0

    @pytest.mark.parametrize("at_once", [1, 8])
    def test_as_many_entries_are_read_at_once_as_the_store_says(
        self, at_once: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MemoryBackend, "parallel_reads", at_once)
        control = make_engine(storage=MemoryBackend())._control
        for tokens in (100, 1200, 100, 1200):  # a second for each round
            control.learn_blend(0.0, 0.0, [("memory", 1, tokens, 1.0)])
        eight = replace(plan(2000), segments=tuple(Segment(i * 150, (i + 1) * 150, f"{i}", 0, False) for i in range(8)))
        fetching_s = control._fetching_s(eight, {f"{i}": "memory" for i in range(8)})
        assert fetching_s["memory"] == pytest.approx(8.0 if at_once == 1 else 1.0)

    def test_a_store_that_turns_out_slow_is_left_alone(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        engine._control._full = PassTimes()
        engine._control.learn_full(256, 0.5)
        prompt = prompt_with(*texts)
        assert [engine.prefill(prompt).stats.hits for _ in range(2)] == 2 * [len(texts)]
        engine._control.learn_blend(0.0, 0.0, [fetch_of(texts, 10.0)] * 9)
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
        engine._control.learn_blend(0.0, 0.0, [fetch_of(texts, 1.0)] * 9)
        assert engine.prefill(prompt).stats.recomputed_tokens > 2 * usual
        engine._control.learn_blend(0.0, 0.0, [fetch_of(texts, 1.0)] * 9)
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
        engine._control._full = PassTimes()
        engine._control.learn_full(256, 5.0)
        engine._control.learn_blend(0.0, 0.0, [fetch_of(texts, 1.0)] * 9)
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
            slow._control.learn_blend(1e8, 1.0, [fetch_of(texts, 60.0)])
        assert torch.equal(slow.prefill(prompt).logits, fast.prefill(prompt).logits)
