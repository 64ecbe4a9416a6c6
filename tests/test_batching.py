"""Several requests at once: decoded together, answered as if each were alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, random_model, random_text
from test_engine_storage import prompt_with
from test_prefetch import damage_layer

from rag_blend import BlendEngine, GenerationCancelledError, PromptTooLongError
from rag_blend.decode import can_decode_together

MakeEngine = Callable[..., BlendEngine]


def prompts_of(texts: list[str]) -> list[str]:
    """Of different lengths, with repeated chunks, without any, and very short."""
    return [
        prompt_with(texts[0]),
        prompt_with(*texts[1:5]),
        prompt_with(texts[2], texts[2], texts[0]),
        "the river",
        prompt_with(random_text(77, 90)),
    ]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are decoded together."""
    sizes: list[int] = []
    usual = BlendEngine.__init__

    def init(engine: BlendEngine, *args: Any, **kwargs: Any) -> None:
        usual(engine, *args, **kwargs)
        together = engine._queue._answer_together
        engine._queue._answer_together = lambda requests: (sizes.append(len(requests)), together(requests))[1]

    monkeypatch.setattr(BlendEngine, "__init__", init)
    return sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_like_each_alone(
    family: str, make_engine: MakeEngine, texts: list[str], batches: list[int]
) -> None:
    engine = make_engine(family, prefix_cache_bytes=0)
    engine.ingest(texts, progress=False)
    prompts = prompts_of(texts)
    alone = [engine.generate(prompt, 12, do_sample=False) for prompt in prompts]
    together = engine.generate_batch(prompts, 12, do_sample=False)
    assert batches == [5]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert [g.text for g in together] == [g.text for g in alone]
    for one, other in zip(alone, together, strict=True):
        assert (one.stats.mode, one.stats.hits, one.stats.reused_tokens) == (
            other.stats.mode,
            other.stats.hits,
            other.stats.reused_tokens,
        )
    assert len({len(g.token_ids) for g in together}) > 1 or all(len(g.token_ids) == 12 for g in together)


def test_ratio_one_equals_the_stock_model(make_engine: MakeEngine, texts: list[str], batches: list[int]) -> None:
    model = random_model()
    engine = make_engine(model=model)
    engine.ingest(texts, progress=False)
    prompts = [engine.tokenizer(prompt)["input_ids"] for prompt in prompts_of(texts)]
    answers = engine.generate_batch(prompts, 10, recompute_ratio=1.0, do_sample=False)
    for ids, answer in zip(prompts, answers, strict=True):
        stock = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :].tolist()
        assert answer.token_ids == stock
    assert batches == [5]


def test_a_penalty_for_repetition_does_not_see_the_padding(
    make_engine: MakeEngine, texts: list[str], batches: list[int]
) -> None:
    model = random_model()
    model.generation_config.repetition_penalty = 1.5
    engine = make_engine(model=model, prefix_cache_bytes=0)
    prompts = prompts_of(texts)
    alone = [engine.generate(prompt, 12, do_sample=False).token_ids for prompt in prompts]
    assert [g.token_ids for g in engine.generate_batch(prompts, 12, do_sample=False)] == alone
    assert batches == [5]


def test_each_row_has_its_own_end(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    prompts = prompts_of(texts)[:3]
    whole = engine.generate_batch(prompts, 20, do_sample=False)
    word = whole[1].text[4:8]
    stopped = engine.generate_batch(prompts, 20, stop=word, do_sample=False)
    for full, cut in zip(whole, stopped, strict=True):
        assert cut.text == full.text.split(word)[0]
    assert len(stopped[1].token_ids) < len(whole[1].token_ids)


def test_the_end_of_sequence_token_ends_its_row_only(make_engine: MakeEngine, texts: list[str]) -> None:
    model = random_model()
    engine = make_engine(model=model, prefix_cache_bytes=0)
    prompts = prompts_of(texts)[:3]
    whole = engine.generate_batch(prompts, 16, do_sample=False)
    model.generation_config.eos_token_id = whole[0].token_ids[3]
    ended = engine.generate_batch(prompts, 16, do_sample=False)
    assert ended[0].token_ids == whole[0].token_ids[: whole[0].token_ids.index(whole[0].token_ids[3]) + 1]
    for full, cut in zip(whole, ended, strict=True):
        assert full.token_ids[: len(cut.token_ids)] == cut.token_ids


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batches_are_bounded(batch: int, make_engine: MakeEngine, texts: list[str], batches: list[int]) -> None:
    engine = make_engine(max_batch=batch)
    answers = engine.generate_batch(prompts_of(texts), 3, do_sample=False)
    assert [len(answer.token_ids) for answer in answers] == [3] * 5
    assert batches == {1: [], 2: [2, 2], 3: [3, 2]}[batch]


def test_nothing_to_answer(make_engine: MakeEngine) -> None:
    assert make_engine().generate_batch([]) == []


@pytest.mark.parametrize(
    "kwargs", [{"num_beams": 2}, {"no_repeat_ngram_size": 2}, {"min_length": 5}, {"output_scores": True}]
)
def test_what_depends_on_the_others_is_answered_alone(
    kwargs: dict[str, Any], make_engine: MakeEngine, texts: list[str], batches: list[int]
) -> None:
    engine = make_engine()
    assert not can_decode_together(engine._model, kwargs)
    answers = engine.generate_batch(prompts_of(texts), 3, do_sample=False, **kwargs)
    assert len(answers) == 5 and batches == []


def test_a_model_whose_frequencies_depend_on_the_length_is_not_mixed(
    make_engine: MakeEngine, texts: list[str], batches: list[int]
) -> None:
    model = random_model(rope="dynamic", max_position_embeddings=128)
    engine = make_engine(model=model, prefix_cache_bytes=0)
    engine.context_window = 1024
    prompts = ["the river", "a bridge", prompt_with(*texts[1:5])]
    alone = [engine.generate(prompt, 6, do_sample=False).token_ids for prompt in prompts]
    assert [g.token_ids for g in engine.generate_batch(prompts, 6, do_sample=False)] == alone
    assert batches == [2]


def test_one_prompt_too_long_and_none_is_answered(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    with pytest.raises(PromptTooLongError):
        engine.generate_batch(["the river", prompt_with(*texts * 20)])


def test_a_failure_while_a_batch_is_chosen_reaches_who_waits(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    usual = engine._queue._go_together

    def fail(first: Any, second: Any) -> bool:
        raise RuntimeError("out of memory")

    engine._queue._go_together = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate_batch(prompts_of(texts)[:2], 2)
    engine._queue._go_together = usual
    assert len(engine.generate_batch(prompts_of(texts)[:2], 2)) == 2


def test_one_failure_leaves_the_others_alone(make_engine: MakeEngine, texts: list[str], batches: list[int]) -> None:
    engine = make_engine()
    usual = engine._server._run

    def run(ids: Any, *rest: Any, **more: Any) -> Any:
        if len(ids) < 10:
            raise RuntimeError("out of memory")
        return usual(ids, *rest, **more)

    engine._server._run = run
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate_batch(prompts_of(texts), 3, do_sample=False)
    assert batches == [5]
    assert len(engine.generate_batch(prompts_of(texts)[:3], 3, do_sample=False)) == 3


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_what_a_failed_prefill_left_behind_is_nobody_elses(
    make_engine: MakeEngine, texts: list[str], failing: int
) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    engine.ingest(texts, progress=False)
    prompts = prompts_of(texts)[:4]
    alone = [engine.generate(prompt, 5, do_sample=False).text for prompt in prompts]
    usual, answered = engine._server._run, engine._server._answered
    numbers = iter(range(len(prompts)))
    found: list[str] = []

    def run(ids: Any, *rest: Any, **more: Any) -> Any:
        result = usual(ids, *rest, **more)
        if next(numbers) == failing:
            raise RuntimeError("out of memory")
        return result

    engine._server._run = run
    engine._server._answered = lambda request, answer: (found.append(answer.text), answered(request, answer))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate_batch(prompts, 5, do_sample=False)
    assert found == [text for number, text in enumerate(alone) if number != failing]


def test_a_chunk_that_proves_damaged_in_the_middle_of_a_prefill_spoils_no_seat(
    make_engine: MakeEngine, texts: list[str], batches: list[int], tmp_path: Path
) -> None:
    """By then the first layer's rows of the prompt lie among those of the others; they are written anew."""
    engine = make_engine(storage=tmp_path)
    engine.ingest(texts, progress=False)
    trace = engine.prefill(prompt_with(texts[2])).trace
    assert trace is not None
    (key,) = (chunk.key for chunk in trace.chunks if chunk.is_hit)
    damage_layer(engine._store, key, 1)
    prompts = prompts_of(texts)
    together = engine.generate_batch(prompts, 8, do_sample=False)
    assert batches == [5] and engine.counts()["corrupt"] == 1
    assert [g.token_ids for g in together] == [engine.generate(p, 8, do_sample=False).token_ids for p in prompts]


class TestConcurrentCalls:
    def test_those_that_wait_are_answered_together(
        self, make_engine: MakeEngine, texts: list[str], batches: list[int]
    ) -> None:
        engine = make_engine(prefix_cache_bytes=0)
        engine.ingest(texts, progress=False)
        prompts = prompts_of(texts)
        alone = [engine.generate(prompt, 8, do_sample=False).text for prompt in prompts]
        found: dict[int, str] = {}

        def stream(number: int) -> None:
            found[number] = "".join(engine.stream(prompts[number], 8, do_sample=False))

        def generate(number: int) -> None:
            found[number] = engine.generate(prompts[number], 8, do_sample=False).text

        with engine._lock:  # all of them find the model busy
            threads = [threading.Thread(target=(stream, generate)[i % 2], args=(i,)) for i in range(5)]
            for thread in threads:
                thread.start()
            while len(engine._queue._waiting) < 4:  # the worker may hold the first one already
                time.sleep(0.01)
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(5)] == alone
        assert sum(batches) >= 4

    def test_who_leaves_the_queue_does_not_hold_it_up(
        self, make_engine: MakeEngine, texts: list[str], batches: list[int]
    ) -> None:
        engine = make_engine()
        prompts = prompts_of(texts)
        failures: list[BaseException] = []
        cancel = threading.Event()

        def generate() -> None:
            try:
                engine.generate(prompts[0], 5, cancel=cancel)
            except BaseException as error:
                failures.append(error)

        with engine._lock:
            threads = [threading.Thread(target=generate) for _ in range(3)]
            for thread in threads:
                thread.start()
            while len(engine._queue._waiting) < 3 and len(threads) > len(engine._queue._waiting) + 1:
                time.sleep(0.01)
            cancel.set()
            for thread in threads[1:]:
                thread.join(5)
            assert sum(not thread.is_alive() for thread in threads) >= 2  # without the model
        threads[0].join(10)
        assert [type(error) for error in failures] == [GenerationCancelledError] * 3
        assert len(engine.generate(prompts[0], 2, do_sample=False).token_ids) == 2

    def test_one_of_a_batch_is_cancelled(self, make_engine: MakeEngine, texts: list[str], batches: list[int]) -> None:
        engine = make_engine(prefix_cache_bytes=0)
        prompts = prompts_of(texts)[:3]
        alone = [engine.generate(prompt, 30, do_sample=False).text for prompt in prompts]
        with engine._lock:
            streams = [engine.stream(prompt, 30, do_sample=False) for prompt in prompts]
            time.sleep(0.2)
        next(streams[1])
        streams[1].close()
        assert "".join(streams[0]) == alone[0]
        assert "".join(streams[2]) == alone[2]
        assert streams[1].result is None

    def test_no_thread_stays(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.generate_batch(prompts_of(texts), 2)
        deadline = time.monotonic() + 5
        while engine._queue._thread is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine._queue._thread is None


def test_memory_does_not_grow_over_many_requests(make_engine: MakeEngine, texts: list[str]) -> None:
    """Caches of finished batches are freed: what stays is the same after 40 batches as after 4."""
    import gc

    engine = make_engine(prefix_cache_bytes=0)
    engine.ingest(texts, progress=False)
    prompts = prompts_of(texts)

    def tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    for _ in range(4):
        engine.generate_batch(prompts, 2, do_sample=False)
    before = tensors()
    for _ in range(40):
        engine.generate_batch(prompts, 2, do_sample=False)
    assert tensors() <= before + 5
