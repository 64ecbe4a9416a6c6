"""Streaming, stop strings and cancellation, apart from any blending."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
from conftest import random_model, random_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, PreTrainedModel

from rag_blend import BlendEngine
from rag_blend.generation import _until_stop as until_stop  # the one piece of logic between thread and consumer
from rag_blend.generation import cut_at_stop, held_back

MakeEngine = Callable[..., BlendEngine]
PROMPT = random_text(1)
ALPHABET = st.text(alphabet="ab ", max_size=12)


@settings(max_examples=300)
@example(["ba", "a"], ["a", "baa"])
@given(st.lists(ALPHABET, max_size=6), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_streamed_pieces_add_up_to_the_cut_text(pieces: list[str], stop: list[str]) -> None:
    assert "".join(until_stop(iter(pieces), stop)) == cut_at_stop("".join(pieces), stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert held_back("the end", ["\n\nQ:"]) == 0
    assert held_back("the end\n", ["\n\nQ:"]) == 1
    assert held_back("the end\n\nQ", ["\n\nQ:"]) == 3
    assert held_back("anything", []) == 0


def counting_model() -> tuple[PreTrainedModel, list[int]]:
    """A model that counts its forwards."""
    model = random_model()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    return model, calls


def test_stream_equals_generate(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPT, 30, do_sample=False)
    assert stream.result is None and stream.stats is None
    text = "".join(stream)
    answer = engine.generate(PROMPT, 30, do_sample=False)
    assert text == answer.text
    assert stream.token_ids == answer.token_ids
    assert stream.stats is not None and stream.stats.prompt_tokens == answer.stats.prompt_tokens
    assert next(stream, "end") == "end"


def test_pieces_come_before_the_end(make_engine: MakeEngine) -> None:
    """The first piece is there while the model still has most of its tokens to generate."""
    model, calls = counting_model()
    engine = make_engine(model=model)
    calls.clear()
    stream = engine.stream(PROMPT, 200, do_sample=False, logits_processor=[Spaces(engine)])
    next(stream)
    seen = len(calls)
    list(stream)
    assert seen < 150 and len(calls) == 200


class Spaces(LogitsProcessor):
    """Makes the model write words separated by spaces, and never end."""

    def __init__(self, engine: BlendEngine) -> None:
        self.word = engine.tokenizer(" river", add_special_tokens=False)["input_ids"][0]

    def __call__(self, input_ids, scores):
        scores[:] = -1e9
        scores[:, self.word] = 0.0
        return scores


@pytest.mark.parametrize("how", ["close", "drop"])
def test_an_abandoned_stream_stops_the_computation(how: str, make_engine: MakeEngine) -> None:
    model, calls = counting_model()
    engine = make_engine(model=model)
    calls.clear()
    stream = engine.stream(PROMPT, 900, do_sample=False, logits_processor=[Spaces(engine)])
    next(stream)
    if how == "close":
        stream.close()
    else:
        thread = stream._thread
        del stream
        gc.collect()
        thread.join(timeout=20)
    assert len(calls) < 900
    assert not [t for t in threading.enumerate() if t.name.startswith("rag-blend-stream")]
    # The engine is free again.
    assert engine.generate(PROMPT, 2).token_ids


def test_closing_is_harmless_at_any_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPT, 3)
    stream.close()
    stream.close()
    assert list(stream) == []
    stream = engine.stream(PROMPT, 3)
    stream._thread.join()  # all of it waits to be read
    stream.close()
    assert list(stream) == []
    done = engine.stream(PROMPT, 3)
    list(done)
    done.close()


def test_an_exception_in_the_worker_reaches_the_consumer(make_engine: MakeEngine) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise MemoryError("out of memory, as far as anybody knows")

    stream = make_engine().stream(PROMPT, 5, logits_processor=[Broken()])
    with pytest.raises(MemoryError, match="as far as anybody knows"):
        list(stream)


def test_stop_strings_in_a_stream(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPT, 50, stop=["river river river"], do_sample=False, logits_processor=[Spaces(engine)])
    text = "".join(stream)
    assert text == " " and len(stream.token_ids) < 50


def test_cancel_from_outside(make_engine: MakeEngine) -> None:
    engine = make_engine()
    cancel = threading.Event()
    stream = engine.stream(PROMPT, 900, cancel=cancel, do_sample=False, logits_processor=[Spaces(engine)])
    next(stream)
    cancel.set()
    start = time.perf_counter()
    list(stream)
    assert time.perf_counter() - start < 20
    assert stream.result is None
