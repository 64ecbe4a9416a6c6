"""A trace says what happened: it agrees with the stats token by token, and its seconds add up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_text, small_tokenizer
from exactness import HEAD, QUESTION
from transformers import GPT2Config, GPT2LMHeadModel

from rag_blend import BlendEngine, Generation, Prefill
from rag_blend.control import Controller
from rag_blend.plan import BlendPlan
from rag_blend.trace import Kind, Trace, TraceRecorder

MakeEngine = Callable[..., BlendEngine]
PARTS = {"tokenise", "queue", "plan", "storage", "select", "compute"}


def traced(answer: Generation | Prefill) -> Trace:
    """The trace, once it is known to agree with the stats."""
    trace, stats = answer.trace, answer.stats
    assert trace is not None
    assert len(trace) == len(trace.kinds) == stats.prompt_tokens
    counts = [trace.count(kind) for kind in (Kind.PREFIX, Kind.REUSED, Kind.RECOMPUTED, Kind.FRESH)]
    assert counts == [stats.prefix_tokens, stats.reused_tokens, stats.recomputed_tokens, stats.fresh_tokens]
    assert trace.seconds.total == pytest.approx(stats.ttft_s, rel=1e-9)
    assert all(seconds >= 0 for seconds in trace.seconds)
    assert len({chunk.key for chunk in trace.chunks if chunk.is_hit}) == stats.hits
    assert len({chunk.key for chunk in trace.chunks if chunk.outcome == "declined"}) == stats.declined
    assert len([chunk for chunk in trace.chunks if chunk.outcome == "elsewhere"]) == stats.misses_elsewhere
    return trace


def text_of(trace: Trace, start: int, end: int) -> str:
    return str(trace.tokenizer.decode(trace.token_ids[start:end].tolist()))


@pytest.mark.parametrize("selector", ["anchor", "probe", "heads", "hkvd", "none", "all"])
def test_kinds_and_chunks_are_those_of_the_blend(make_engine: MakeEngine, texts: list[str], selector: str) -> None:
    engine = make_engine(selector=selector)
    engine.ingest(texts[:3], head=HEAD, progress=False)
    trace = traced(engine.generate(HEAD + "\n\n".join([texts[2], texts[0]]) + QUESTION, 3))
    head, *chunks = trace.chunks
    assert text_of(trace, head.start, head.end) == HEAD
    assert [text_of(trace, chunk.start, chunk.end).strip() for chunk in chunks] == [texts[2], texts[0]]
    assert all(chunk.num_tokens == len(chunk) and not chunk.cut_behind for chunk in chunks)
    assert (trace.scores is not None) == (selector in {"anchor", "probe"})
    assert (trace.kinds[trace.owners() < 0] == Kind.FRESH).all()
    assert (trace.kinds[trace.owners() >= 0] != Kind.FRESH).all()


def test_scores_are_shares_of_the_question_s_attention(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, head=HEAD, progress=False)
    scores = traced(engine.prefill(HEAD + "\n\n".join(texts) + QUESTION)).scores
    assert scores is not None and scores.dtype == np.float32
    assert (scores >= 0).all() and 0.5 < scores.sum() <= 1.0 + 1e-5


def test_a_trace_cannot_be_changed(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, head=HEAD, progress=False)
    trace = traced(engine.prefill(HEAD + "\n\n".join(texts[:2]) + QUESTION))
    for array in (trace.token_ids, trace.kinds, trace.scores):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_cut_chunk(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, head=HEAD, progress=False)
    words = texts[3].split()
    trace = traced(engine.prefill(HEAD + " ".join(words[10:50]) + QUESTION))
    _, chunk = trace.chunks
    assert chunk.offset > 5 and chunk.cut_behind > 5
    assert chunk.num_tokens == chunk.offset + len(chunk) + chunk.cut_behind


def test_misses_and_their_reasons(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
    engine = make_engine(storage=tmp_path, kv_dtype=torch.float16)  # then the rows end an entry
    engine.ingest(texts[:2], head="Another head of the valley and the river and the north.\n", progress=False)
    known = set(engine._catalog.keys_in(np.asarray(engine.tokenizer(texts[0])["input_ids"], dtype=np.int32)))
    engine.ingest(texts[2:5], head=HEAD, progress=False)
    prompt = HEAD + "\n\n".join([texts[0], texts[2], texts[3], texts[4]]) + QUESTION
    whole = traced(engine.prefill(prompt))
    assert [chunk.outcome for chunk in whole.chunks] == ["exact", "elsewhere", "blended", "blended", "blended"]
    assert {whole.chunks[1].key} == known
    flip_last_byte(tmp_path, whole.chunks[2].key)
    damaged = traced(engine.prefill(prompt))
    assert [chunk.outcome for chunk in damaged.chunks] == ["exact", "elsewhere", "damaged", "blended", "blended"]
    assert damaged.chunks[2].start == whole.chunks[2].start and len(damaged.chunks[2]) == len(whole.chunks[2])
    file_of(tmp_path, whole.chunks[3].key).unlink()
    lost = traced(engine.prefill(prompt))
    assert [chunk.outcome for chunk in lost.chunks] == ["exact", "elsewhere", "lost", "blended"]
    assert (lost.kinds[whole.chunks[3].start : whole.chunks[3].end] == Kind.FRESH).all()


def test_a_chunk_that_is_gone_before_it_is_found_has_no_place(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    make_engine(storage=tmp_path).ingest(texts[:2], progress=False)
    engine = make_engine(storage=tmp_path)  # which has never opened them
    for file in tmp_path.glob("??/*.safetensors"):
        file.unlink()
    answer = engine.prefill(HEAD + texts[0] + QUESTION)
    (chunk,) = traced(answer).chunks
    assert (chunk.outcome, len(chunk)) == ("lost", 0) and answer.stats.misses == 1


def test_chunks_that_are_not_worth_it(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "best", lambda self, plan, places, work_of: BlendPlan(plan.num_tokens, ()))
    engine = make_engine()
    engine.ingest(texts[:2], head=HEAD, progress=False)
    answer = engine.prefill(HEAD + "\n\n".join(texts[:2]) + QUESTION)
    chunks = traced(answer).chunks
    assert [chunk.outcome for chunk in chunks] == ["declined"] * 3 and answer.stats.declined == 3
    assert not any(chunk.is_hit or chunk.is_miss for chunk in chunks) and chunks[2].num_tokens == len(chunks[2])


def test_an_earlier_prompt(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine(prefix_cache_bytes=2**24)
    engine.generate(HEAD + texts[0], 2)
    trace = traced(engine.generate(HEAD + texts[0] + QUESTION, 2))
    assert trace.kept > 20 and not trace.chunks
    assert (trace.kinds[: trace.kept] == Kind.PREFIX).all()


def test_where_nothing_is_reused(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, progress=False)
    trace = traced(engine.generate(HEAD + texts[0] + QUESTION, 2, reuse=False))
    assert trace.count(Kind.FRESH) == len(trace) and not trace.chunks and trace.scores is None


def test_a_model_that_cannot_be_blended(make_engine: MakeEngine) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=1, n_head=2, eos_token_id=None)).eval()
    engine = make_engine(model=model, on_unsupported="full", prefix_cache_bytes=2**24)
    engine.generate(HEAD, 2)
    assert traced(engine.generate(HEAD + QUESTION, 2)).kept > 16


def test_answers_of_a_batch_have_their_own(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    engine.ingest(texts, progress=False)
    prompts = [HEAD + texts[i] + "\n\n" + texts[i + 1] + QUESTION for i in range(3)]
    answers = engine.generate_batch(prompts, 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        trace = traced(answer)
        assert text_of(trace, 0, len(trace)) == prompt
        assert trace.seconds.compute > 0
    assert answers[0].trace.seconds.queue > 0  # while the others were prefilled


def test_time_is_charged_to_what_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("rag_blend.trace.time.perf_counter", lambda: next(now))
    record = TraceRecorder()
    record.turn("plan")
    record.turn("select")

    class Source:
        def layer(self, layer_idx: int) -> None:
            return None

    record.awaited(Source()).layer(0)  # type: ignore[arg-type]
    record.turn("compute")
    seconds = record.trace(np.zeros(0, dtype=np.int32), small_tokenizer(), until=14.0).seconds
    assert seconds._asdict() == {
        "tokenise": 1.0, "queue": 0.0, "plan": 2.0, "select": 7.0, "storage": 4.0, "compute": 0.0,
    }  # fmt: skip
    assert set(seconds._asdict()) == PARTS


def test_whoever_listens_hears_every_answer(make_engine: MakeEngine, texts: list[str]) -> None:
    engine = make_engine()
    with engine.listening() as outer:
        engine.generate(texts[0], 2)
        with engine.listening() as inner:
            thread = threading.Thread(target=engine.generate, args=(texts[1], 2))
            thread.start()
            thread.join()
        stream = engine.stream(texts[2], 2)
        "".join(stream)
    engine.generate(texts[3], 2)
    assert [len(outer), len(inner)] == [3, 1]
    assert outer[1] is inner[0] and outer[2] is stream.result


def test_a_streamed_answer_has_one(make_engine: MakeEngine) -> None:
    stream = make_engine().stream(random_text(1), 3)
    "".join(stream)
    assert stream.result is not None
    traced(stream.result)


def file_of(storage: Path, key: str) -> Path:
    return next(storage.glob(f"??/{key}*.safetensors"))


def flip_last_byte(storage: Path, key: str) -> None:
    file = file_of(storage, key)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
