"""What a controller costs and gains on machines whose every time is a formula: the promises, without a clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine, Store

from rag_blend.control import Backoff, Controller, ModelCost
from rag_blend.plan import BlendPlan, Segment

COST = ModelCost(flops_per_row=2e8, flops_per_pair=1e5, num_layers=10)
CHUNKS = 8
WORTH, MOST_WORK = 0.9, 0.8  # of a full prefill's time and work: a blend that needs more is declined by design
FAST, QUESTION = Store(0.0, 1e-6), 40
Prompt = tuple[BlendPlan, dict[str, str]]

pytestmark = pytest.mark.declines


def prompt(length: int, stored: int, places: list[str]) -> Prompt:
    """So many tokens of chunks, the first ones stored, and a question; and where the chunks come from."""
    each = length // CHUNKS
    segments = tuple(Segment(i * each, (i + 1) * each, f"c{i}", 0, exact=False) for i in range(stored))
    return BlendPlan(length + QUESTION, segments), {f"c{i}": places[i] for i in range(stored)}


def started(machine: Machine) -> Controller:
    """A controller as an engine makes it: two short prefills have been timed."""
    controller = Controller(machine.cost, parallel_reads=machine.parallel_reads)
    for tokens in (64, 256):
        controller.learn_full(tokens, machine.full_s(tokens))
    return controller


class TestSlowStores:
    """The same kind of prompt again and again, all of it stored in one place."""

    PROMPT = prompt(2000, CHUNKS, CHUNKS * ["remote"])
    FULL_S = Machine(COST, {}).full_s(2000 + QUESTION)

    def machine(self, times_full: float) -> Machine:
        return Machine(COST, {"remote": Store(0.0, times_full * self.FULL_S / 2000)})

    @pytest.mark.parametrize(("times_full", "noise"), [(1.5, 0.2), (3, 0.0), (10, 0.0), (10, 0.2), (100, 0.0)])
    def test_a_store_that_is_too_slow_spoils_less_than_one_answer_in_a_hundred(
        self, times_full: float, noise: float
    ) -> None:
        machine = replace(self.machine(times_full), noise=noise)
        controller = started(machine)
        slow = [machine.answer(controller, *self.PROMPT).reuses for _ in range(2000)]
        assert 2 < sum(slow) < 20
        assert sum(slow[-1000:]) <= 10

    @pytest.mark.parametrize("slow_for", [10, 100, 2000])
    def test_a_store_that_becomes_fast_again_is_used_again_soon(self, slow_for: int) -> None:
        machine = self.machine(10)
        controller = started(machine)
        for _ in range(slow_for):
            machine.answer(controller, *self.PROMPT)
        machine.stores = {"remote": FAST}
        declined = [not machine.answer(controller, *self.PROMPT).reuses for _ in range(3000)]
        assert sum(declined) <= slow_for + 10
        assert declined.index(False) == sum(declined)  # once one trial was fast, it is used always

    def test_a_store_that_slows_down_for_prompts_of_all_sizes_is_left_alone_soon(self) -> None:
        machine = self.machine(0.01)
        controller, rng = started(machine), random.Random(0)
        for _ in range(100):
            machine.answer(controller, *_any_prompt(rng, ["remote"], CHUNKS))
        machine.stores = self.machine(10).stores
        done = [machine.answer(controller, *_any_prompt(rng, ["remote"], CHUNKS)) for _ in range(2000)]
        assert sum(plan.reuses for plan in done) < 40

    def test_a_store_that_becomes_slow_is_left_alone_soon(self) -> None:
        machine = self.machine(0.01)
        controller = started(machine)
        assert all(machine.answer(controller, *self.PROMPT).reuses for _ in range(50))
        machine.stores = self.machine(10).stores
        assert sum(machine.answer(controller, *self.PROMPT).reuses for _ in range(2000)) < 20

    def test_prompts_of_all_sizes_do_not_try_it_one_by_one(self) -> None:
        machine = self.machine(10)
        controller, rng = started(machine), random.Random(0)
        done = [machine.answer(controller, *_any_prompt(rng, ["remote"], CHUNKS)) for _ in range(2000)]
        assert sum(plan.reuses for plan in done) < 20

    def test_a_store_whose_latency_is_too_long_for_short_prompts_serves_the_long_ones(self) -> None:
        machine = Machine(COST, {"remote": Store(1.0, 1e-5)}, parallel_reads=CHUNKS)
        controller = started(machine)
        short, long = (prompt(length, CHUNKS, CHUNKS * ["remote"]) for length in (256, 8000))
        done = [[machine.answer(controller, *asked).reuses for asked in (short, long)] for _ in range(300)]
        assert sum(used for used, _ in done) < 15
        assert all(used for _, used in done)


def _any_prompt(rng: random.Random, stores: list[str], least: int = 0) -> Prompt:
    """128 to 8,192 tokens, any share of the chunks stored, in one place or in several."""
    nearest = rng.choice(stores)
    places = rng.choice([CHUNKS * [nearest], rng.choices(stores, k=CHUNKS)])
    return prompt(int(128 * 2 ** rng.uniform(0, 6)), rng.randint(least, CHUNKS), places)


def _possible(machine: Machine, plan: BlendPlan, places: dict[str, str]) -> Iterator[BlendPlan]:
    """What may be reused: the chunks of any of the places, unless that computes most of the prompt."""
    names = sorted(set(places.values()))
    for chosen in range(1, 2 ** len(names)):
        left = {name for i, name in enumerate(names) if chosen >> i & 1}
        candidate = replace(plan, segments=tuple(s for s in plan.segments if places[s.key] in left))
        if machine.work_of(candidate) <= MOST_WORK * machine.cost.prefill(plan.num_tokens):
            yield candidate


MACHINES = st.builds(
    Machine,
    cost=st.just(COST),
    stores=st.fixed_dictionaries(
        {
            "memory": st.builds(Store, st.just(0.0), st.floats(1e-7, 1e-5)),
            "disk": st.builds(Store, st.floats(0.0, 0.01), st.floats(1e-6, 1e-4)),
            "remote": st.builds(Store, st.floats(0.01, 0.5), st.floats(1e-5, 1e-2)),
        }
    ),
    full_overhead_s=st.floats(0.0, 0.1),
    blend_overhead_s=st.floats(0.0, 0.3),
    blend_flops_per_s=st.floats(0.4e11, 1e11),
    parallel_reads=st.sampled_from([1, 2, 8]),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
    rng=st.builds(random.Random, st.integers(0, 999)),
)


class TestAnyMachine:
    """Prompts of 128 to 8,192 tokens with 0 to 100 % of the chunks stored, in memory, on disk, remote or mixed."""

    @settings(max_examples=25)
    @given(MACHINES)
    def test_after_a_while_the_choice_is_about_the_best(self, machine: Machine) -> None:
        controller, rng = started(machine), machine.rng
        for _ in range(200):
            machine.answer(controller, *_any_prompt(rng, list(machine.stores)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Backoff, "refuse", lambda self, cost: False)  # trials are bounded by tests of their own
            for _ in range(40):
                self._judge(machine, controller, *_any_prompt(rng, list(machine.stores)))

    def _judge(self, machine: Machine, controller: Controller, plan: BlendPlan, places: dict[str, str]) -> None:
        done, full_s = controller.best(plan, places, machine.work_of), machine.full_s(plan.num_tokens)
        least = min([WORTH * full_s, *(machine.seconds(one, places) for one in _possible(machine, plan, places))])
        seconds = machine.seconds(done, places) if done.reuses else WORTH * full_s
        assert seconds <= (1.05 + 2 * machine.noise) * least  # two times are compared, and both are noisy
        assert not done.reuses or seconds <= (1.05 + machine.noise) * full_s
