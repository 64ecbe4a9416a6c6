"""ChatBlend and BlendLLM against LangChain's contracts, on an engine whose steps can be watched and made to fail."""

import asyncio
import copy
import gc
import json
import pickle
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_rag_blend import BlendLLM, ChatBlend
from langchain_rag_blend import base as base_module
from langchain_rag_blend.options import generation_options
from langchain_rag_blend.tools import opening, parse, readable_part
from langchain_toys import NO_SYSTEM, obedient, save_toy, scripted_engine, toy_engine, toy_tokenizer
from pydantic import BaseModel

from rag_blend import BlendEngine, Generation, GenerationCancelledError, GenerationStats, PromptTooLongError

STATS = GenerationStats(
    prompt_tokens=100, prefix_tokens=10, reused_tokens=60, recomputed_tokens=5, fresh_tokens=25,
    recompute_ratio=0.08, mode="blend", ttft_s=0.1, load_s=0.01, hits=2, misses=0,
)  # fmt: skip
MODELS = {"chat": ChatBlend, "text": BlendLLM}


class WatchedStream:
    """Yields the engine's words; one step per word, counted."""

    def __init__(self, engine, cancel):
        self.engine, self.cancel = engine, cancel or threading.Event()
        self.stats, self.token_ids = None, []
        self._words = iter(engine.words)

    def __iter__(self):
        return self

    def __next__(self):
        if self.cancel.is_set():
            raise StopIteration
        time.sleep(self.engine.step_s)
        self.engine.steps += 1
        if self.engine.steps == self.engine.fail_at:
            raise RuntimeError("out of memory")
        word = next(self._words, None)
        if word is None:
            self.stats = STATS
            raise StopIteration
        self.token_ids.append(len(self.token_ids))
        return word

    def close(self):
        self.cancel.set()
        self.engine.closed_streams += 1


class WatchedEngine(BlendEngine):
    """Stands in for a BlendEngine."""

    model_name = "watched"
    context_window = 4096

    def __init__(self, kind="chat", words=("one", " two", " three"), step_s=0.0, fail_at=0):
        self.tokenizer = toy_tokenizer(kind)
        self.words, self.step_s, self.fail_at = words, step_s, fail_at
        self.steps = self.closed_streams = self.closed = 0
        self.calls = []

    def generate(self, prompt, add_special_tokens=None, cancel=None, **options):
        stream = self._start(prompt, add_special_tokens, cancel, options)
        text = "".join(stream)
        if stream.cancel.is_set():
            raise GenerationCancelledError("cancelled")
        return Generation(text, stream.token_ids, STATS)

    def generate_batch(self, prompts, **options):
        return [self.generate(prompt, **options) for prompt in prompts]

    def stream(self, prompt, add_special_tokens=None, cancel=None, **options):
        return self._start(prompt, add_special_tokens, cancel, options)

    def _start(self, prompt, special, cancel, options):
        thread = threading.current_thread().name
        self.calls.append(SimpleNamespace(prompt=prompt, special=special, thread=thread, **options))
        return WatchedStream(self, cancel)

    def close(self):
        self.closed += 1


def make(kind="chat", llm_options=None, **engine_options):
    engine = WatchedEngine(**{"kind": kind, **engine_options})
    return MODELS["text" if kind == "text" else "chat"](engine=engine, **(llm_options or {})), engine


def text_of(chunk):
    return chunk if isinstance(chunk, str) else chunk.content


# --- the class


def test_nothing_is_loaded_before_the_first_call(tmp_path):
    llm = ChatBlend(model=str(tmp_path / "nowhere"))
    assert llm.loaded_engine is None
    assert "nowhere" in repr(llm)
    with pytest.raises(OSError, match="nowhere"):
        llm.invoke("Hello")


@pytest.mark.parametrize("kind", MODELS)
def test_a_misspelt_argument_is_refused_and_the_standard_ones_are_not(kind):
    with pytest.raises(ValueError, match="temprature"):
        MODELS[kind](model="somewhere", temprature=0)
    llm = MODELS[kind](
        model="somewhere", temperature=0, max_new_tokens=5, stop="x", timeout=60, max_retries=2, api_key="k",
        streaming=True, storage="kv",
    )  # fmt: skip
    assert (llm.max_tokens, llm.stop, llm.timeout, llm.temperature) == (5, ["x"], 60, 0)


def test_a_model_or_an_engine_is_needed_but_not_both():
    with pytest.raises(ValueError, match="give a model"):
        ChatBlend()
    with pytest.raises(ValueError, match="either a model or an engine"):
        ChatBlend(model="somewhere", engine=WatchedEngine())
    assert ChatBlend(engine=WatchedEngine()).model == "watched"


def test_tracers_get_the_settings_and_no_engine():
    llm, _ = make(llm_options={"temperature": 0.5, "stop": ["x"]})
    assert len(dumps(llm)) < 2000
    params = llm._get_ls_params()
    assert params["ls_provider"] == "rag_blend"
    assert (params["ls_model_name"], params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (
        "watched",
        0.5,
        256,
        ["x"],
    )


def test_tokens_are_counted_with_the_models_own_tokenizer():
    llm, engine = make()
    text = "the river and the mountain"
    assert llm.get_num_tokens(text) == len(engine.tokenizer(text)["input_ids"])
    assert llm.get_num_tokens_from_messages([HumanMessage(text)]) > llm.get_num_tokens(text)


# --- prompts


def rendered(messages, kind="chat"):
    engine = WatchedEngine(kind)
    ChatBlend(engine=engine).invoke(messages)
    return engine.calls[0].prompt, engine.calls[0].special


def test_a_conversation_goes_through_the_chat_template():
    messages = [("system", "Be kind."), ("human", "Hello"), ("ai", "Hi"), ("human", "Bye")]
    assert rendered(messages) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        False,
    )


def test_a_base_model_reads_the_plain_dialogue():
    assert rendered([SystemMessage("Be kind."), HumanMessage("Hello")], "text") == (
        "System: Be kind.\nHuman: Hello\nAI:",
        None,
    )


def test_one_bos_even_if_the_tokenizer_adds_one():
    engine = WatchedEngine("text")
    engine.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ChatBlend(engine=engine).invoke("Hello")
    call = engine.calls[0]
    ids = engine.tokenizer(call.prompt, add_special_tokens=call.special)["input_ids"]
    assert ids.count(engine.tokenizer.bos_token_id) == 1


def test_system_and_double_turns_are_folded_where_the_template_refuses_them():
    prompt, _ = rendered([SystemMessage("Be kind."), HumanMessage("Hello"), HumanMessage("there")], NO_SYSTEM)
    assert prompt.startswith("<|im_start|>user\nBe kind.\n\nHello\n\nthere<|im_end|>")


def test_a_conversation_that_no_form_fits_is_an_error_that_quotes_the_template():
    with pytest.raises(ValueError, match="only on Sundays"):
        rendered("Hello", "{{ raise_exception('only on Sundays') }}")


def test_roles_names_and_blocks():
    blocks = [{"type": "text", "text": "Hel"}, "lo"]
    assert "<|im_start|>user\nHello<|im_end|>" in rendered([HumanMessage(blocks, name="ann")])[0]
    assert "<|im_start|>critic\nNo.<|im_end|>" in rendered([ChatMessage(role="critic", content="No.")])[0]
    with pytest.raises(ValueError, match="image_url"):
        rendered([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])
    with pytest.raises(ValueError, match="at least one message"):
        rendered([])


def test_template_variables_are_used():
    engine = WatchedEngine("{{ mood }}{{ messages[0].content }}")
    ChatBlend(engine=engine, chat_template_kwargs={"mood": "calm "}).invoke("Hello")
    assert engine.calls[0].prompt == "calm Hello"


def test_a_text_model_completes_the_prompt_as_it_is():
    llm, engine = make("text")
    assert llm.invoke("Once upon") == "one two three"
    assert (engine.calls[0].prompt, engine.calls[0].special) == ("Once upon", None)


# --- options


@pytest.mark.parametrize(
    ("defaults", "call", "stop", "expected"),
    [
        ({"max_tokens": 7}, {}, None, {"max_new_tokens": 7, "stop": []}),
        ({"max_tokens": 7}, {"max_tokens": 3}, ["x"], {"max_new_tokens": 3, "stop": ["x"]}),
        ({"stop": ["a"]}, {"stop": ["b"]}, None, {"stop": ["b"]}),
        ({"stop": ["a"]}, {}, [], {"stop": []}),
        ({}, {"temperature": 0}, None, {"do_sample": False, "stop": []}),
        ({}, {"temperature": 0.5}, None, {"temperature": 0.5, "do_sample": True, "stop": []}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0}, None, {"do_sample": False, "stop": []}),
        ({"temperature": 0.5, "do_sample": False}, {}, None, {"do_sample": False, "stop": []}),
        ({"max_tokens": 7, "max_new_tokens": 5}, {"stream": True}, None, {"max_new_tokens": 5, "stop": []}),
    ],
)
def test_call_arguments_win_and_the_temperature_decides_about_sampling(defaults, call, stop, expected):
    assert generation_options(defaults, call, stop) == expected


@pytest.mark.parametrize("kind", MODELS)
async def test_every_endpoint_passes_the_options_on(kind):
    llm, engine = make(kind, {"generate_kwargs": {"top_k": 5}})
    bound = llm.bind(stop=["x"], max_tokens=9, temperature=0.5)
    bound.invoke("p")
    list(bound.stream("p"))
    await bound.ainvoke("p")
    _ = [chunk async for chunk in bound.astream("p")]
    bound.batch(["p", "q"])
    await bound.abatch(["p"])
    assert len(engine.calls) == 7
    for made in engine.calls:
        assert (made.stop, made.max_new_tokens, made.temperature, made.do_sample, made.top_k) == (
            ["x"],
            9,
            0.5,
            True,
            5,
        )


def test_another_model_for_one_call_is_refused():
    llm, _ = make()
    with pytest.raises(ValueError, match="one model, watched"):
        llm.invoke("p", model="other")


# --- answers


def test_an_answer_carries_usage_and_figures_as_plain_values():
    llm, _ = make()
    with get_usage_metadata_callback() as seen:
        message = llm.invoke("p")
    assert message.content == "one two three"
    assert message.usage_metadata == {
        "input_tokens": 100,
        "output_tokens": 3,
        "total_tokens": 103,
        "input_token_details": {"cache_read": 70},
    }
    assert message.response_metadata["model_name"] == "watched"
    assert message.response_metadata["rag_blend"]["mode"] == "blend"
    assert seen.usage_metadata["watched"]["input_token_details"]["cache_read"] == 70
    json.dumps(message.response_metadata)


def test_a_stream_adds_up_to_the_answer():
    llm, _ = make()
    chunks = list(llm.stream("p"))
    assert [chunk.content for chunk in chunks] == ["one", " two", " three", ""]
    whole = chunks[0] + chunks[1] + chunks[2] + chunks[3]
    answer = llm.invoke("p")
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata == answer.response_metadata
    assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]


def test_a_text_model_reports_the_same():
    llm, _ = make("text")
    result = llm.generate(["p", "q"])
    assert [generation[0].text for generation in result.generations] == ["one two three"] * 2
    assert result.generations[0][0].generation_info["usage_metadata"]["input_token_details"] == {"cache_read": 70}
    assert result.llm_output["token_usage"] == {"prompt_tokens": 200, "completion_tokens": 6, "total_tokens": 206}
    assert list(llm.stream("p")) == ["one", " two", " three", ""]


@pytest.mark.parametrize("kind", MODELS)
async def test_callbacks_hear_every_token(kind):
    class Ears(BaseCallbackHandler):
        def __init__(self):
            self.heard = []

        def on_llm_new_token(self, token, **kwargs):
            self.heard.append(token)

    llm, _ = make(kind)
    sync_ears, async_ears = Ears(), Ears()
    list(llm.stream("p", config={"callbacks": [sync_ears]}))
    _ = [chunk async for chunk in llm.astream("p", config={"callbacks": [async_ears]})]
    assert "".join(sync_ears.heard) == "".join(async_ears.heard) == "one two three"
    streaming, _ = make(kind, {"streaming": True})
    inner_ears = Ears()
    assert text_of(streaming.invoke("p", config={"callbacks": [inner_ears]})) == "one two three"
    assert bool(inner_ears.heard) == (kind == "chat")  # LangChain's text models know no such thing


def test_the_response_cache_knows_what_an_answer_depends_on():
    cache = InMemoryCache()
    llm, engine = make(llm_options={"cache": cache})
    llm.invoke("p")
    llm.invoke("p")
    assert len(engine.calls) == 1
    other = ChatBlend(engine=engine, cache=cache, recompute_ratio=0.5)
    other.invoke("p")
    llm.invoke("p", stop=["x"])
    assert len(engine.calls) == 3


# --- the event loop stays free


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("endpoint", ["ainvoke", "astream"])
async def test_the_event_loop_ticks_during_generation(kind, endpoint):
    llm, engine = make(kind, words=("w",) * 10, step_s=0.02)
    ticks, done = 0, asyncio.Event()

    async def tick():
        nonlocal ticks
        while not done.is_set():
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    if endpoint == "ainvoke":
        await llm.ainvoke("p")
    else:
        _ = [chunk async for chunk in llm.astream("p")]
    done.set()
    await ticker
    assert ticks >= 5
    assert engine.calls[0].thread == "rag-blend-call"


@pytest.mark.parametrize("kind", MODELS)
async def test_tokens_arrive_one_by_one(kind):
    llm, _ = make(kind, words=("w",) * 5, step_s=0.05)
    start = time.monotonic()
    times = [time.monotonic() - start async for _ in llm.astream("p")]
    assert times[-1] - times[0] > 0.1


async def test_abatch_runs_side_by_side_on_one_engine():
    llm, engine = make()
    answers = await llm.abatch(["p"] * 20)
    assert [answer.content for answer in answers] == ["one two three"] * 20
    assert len(engine.calls) == 20


# --- whoever stops listening stops the computation

LONG = {"words": ("w",) * 400, "step_s": 0.005}


def wait_until_idle(engine, within=2.0):
    """Return the number of steps once it stays the same."""
    deadline, seen = time.monotonic() + within, -1
    while seen != engine.steps:
        assert time.monotonic() < deadline, "the computation goes on"
        seen = engine.steps
        time.sleep(0.1)
    while any(thread.name == "rag-blend-call" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread was left behind"
        time.sleep(0.01)
    return seen


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["close", "drop"])
def test_leaving_a_stream_stops_it(kind, how):
    llm, engine = make(kind, **LONG)
    stream = llm.stream("p")
    next(stream)
    if how == "close":
        stream.close()
    del stream  # nothing else holds it
    assert engine.closed_streams == 1


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["aclose", "break", "cancel"])
async def test_leaving_an_async_stream_stops_it(kind, how):
    llm, engine = make(kind, **LONG)

    async def read(limit):
        stream = llm.astream("p")
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == limit:
                break
        if how == "aclose":
            await stream.aclose()

    if how == "cancel":
        task = asyncio.create_task(read(10**6))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await read(2)
    await asyncio.sleep(0.1)
    assert wait_until_idle(engine) < 200
    assert engine.closed_streams == 1


@pytest.mark.parametrize("kind", MODELS)
async def test_cancelling_the_task_stops_the_computation(kind):
    llm, engine = make(kind, **LONG)
    task = asyncio.create_task(llm.ainvoke("p"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < wait_until_idle(engine) < 200


@pytest.mark.parametrize("kind", MODELS)
async def test_failures_are_raised_where_the_answer_was_due(kind):
    for endpoint in ("invoke", "stream", "ainvoke", "astream", "batch"):
        llm, _ = make(kind, fail_at=2)
        with pytest.raises(RuntimeError, match="out of memory"):
            if endpoint == "batch":
                llm.batch(["p"])
            elif endpoint == "astream":
                _ = [chunk async for chunk in llm.astream("p")]
            elif endpoint == "ainvoke":
                await asyncio.wait_for(llm.ainvoke("p"), 5)
            else:
                list(getattr(llm, endpoint)("p"))


@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_that_takes_too_long_is_given_up(kind):
    llm, engine = make(kind, {"timeout": 0.1}, **LONG)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        llm.invoke("p")
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        list(llm.stream("p"))
    assert wait_until_idle(engine) < 200
    quick, _ = make(kind, {"timeout": 60})
    assert text_of(quick.invoke("p")) == "one two three"
    deadline = time.monotonic() + 2
    while any(thread.name == "rag-blend-timeout" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a timer was left behind"
        time.sleep(0.01)


def test_a_prompt_that_is_too_long_is_the_engines_own_error():
    with toy_engine() as engine:
        llm = ChatBlend(engine=engine)
        for run in (llm.invoke, lambda text: list(llm.stream(text))):
            with pytest.raises(PromptTooLongError, match="context window"):
                run("river " * 9000)


# --- one engine, made late


@pytest.fixture
def made(monkeypatch):
    """The engines that are made by name."""
    made = []

    class Factory:
        @staticmethod
        def from_pretrained(model, **options):
            time.sleep(0.05)
            engine = WatchedEngine()
            engine.model_name = model
            made.append((engine, options))
            return engine

    monkeypatch.setattr(base_module, "BlendEngine", Factory)
    return made


def test_the_engine_is_made_once_on_first_use_with_the_configuration(made, tmp_path):
    llm = ChatBlend(model="once", storage=tmp_path, recompute_ratio=0.5, engine_options={"device": "cpu"})
    assert not made
    threads = [threading.Thread(target=llm.invoke, args=("p",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((engine, options),) = made
    assert len(engine.calls) == 4
    assert options == {
        "storage": str(tmp_path), "selector": "anchor", "recompute_ratio": 0.5, "prime": "sample",
        "namespace": "default", "device": "cpu",
    }  # fmt: skip
    llm.close()


def test_objects_with_the_same_settings_share_an_engine_until_the_last_is_closed(made, tmp_path):
    first = ChatBlend(model="shared", storage=tmp_path)
    second = BlendLLM(model="shared", storage=f"{tmp_path}/", max_tokens=5)
    third = ChatBlend(model="shared", storage=tmp_path, namespace="another")
    assert first.get_engine() is second.get_engine()
    assert third.get_engine() is not first.get_engine()
    (engine, _), (other, _) = made
    first.close()
    assert not engine.closed
    second.close()
    assert engine.closed and not other.closed
    third.close()
    assert first.invoke("p").content  # loads it again
    assert len(made) == 3
    first.close()


def test_objects_that_are_dropped_leave_the_engine_for_the_next(made, tmp_path):
    for _ in range(3):
        ChatBlend(model="dropped", storage=tmp_path).invoke("p")
    gc.collect()
    ((engine, _),) = made
    assert not engine.closed
    ChatBlend(model="dropped", storage=tmp_path).close()
    assert engine.closed


def test_an_engine_that_was_given_stays_open():
    llm, engine = make()
    llm.close()
    assert not engine.closed
    assert llm.invoke("p").content


def test_copies_share_the_engine(made, tmp_path):
    llm = ChatBlend(model="copied", storage=tmp_path)
    engine = llm.get_engine()
    configurable = llm.configurable_fields(max_tokens=ConfigurableField(id="limit"))
    configurable.with_config(configurable={"limit": 5}).invoke("p")
    for other in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(update={"max_tokens": 5})):
        assert other.get_engine() is engine
    assert len(made) == 1
    assert engine.calls[0].max_new_tokens == 5
    llm.close()
    given, watched = make()
    assert copy.deepcopy(given).get_engine() is watched
    configurable = given.configurable_fields(max_tokens=ConfigurableField(id="limit"))
    configurable.with_config(configurable={"limit": 5}).invoke("p")
    assert watched.calls[0].max_new_tokens == 5


def test_a_pickle_holds_the_configuration(tmp_path):
    llm = ChatBlend(model="pickled", storage=tmp_path, generate_kwargs={"top_k": 3}, stop=["x"])
    other = pickle.loads(pickle.dumps(llm))
    assert other.model_dump() == llm.model_dump()
    assert other.loaded_engine is None
    other.close()
    with pytest.raises(TypeError, match="built from an engine object"):
        pickle.dumps(make()[0])


# --- tools

NAMES = ["add", "say"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        (CALL, "", [("add", {"a": 1})]),
        ("Let me see.\n" + CALL + "\n" + CALL, "Let me see.", [("add", {"a": 1})] * 2),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {}}]', "",
         [("add", {"a": 1}), ("say", {})]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('[{"name": "add", "arguments": {"a": 1}}]', "", [("add", {"a": 1})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}; {"name": "say", "parameters": {}}', "",
         [("add", {"a": 1}), ("say", {})]),
        ('{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
        ("[1] is the source", "[1] is the source", []),
        ('<tool_call>{"name": "say", "arguments": {"text": "line\nbreak"}}', "", [("say", {"text": "line\nbreak"})]),
    ],
)  # fmt: skip
def test_tool_calls_are_read_in_the_formats_that_templates_teach(text, content, calls):
    answer = parse(text, NAMES)
    assert answer.text == content
    assert [(call["name"], call["args"]) for call in answer.calls] == calls
    assert len({call["id"] for call in answer.calls}) == len(calls)
    assert not answer.invalid


def test_a_call_that_was_cut_off_is_an_invalid_one():
    answer = parse('Well. <tool_call>\n{"name": "add", "argum', NAMES)
    assert (answer.text, answer.calls) == ("Well.", [])
    assert answer.invalid[0]["args"].startswith("<tool_call>")


@pytest.mark.parametrize("text", ["Let me see. " + CALL, '{"name": "add", "parameters": {}}', "[TOOL_CALLS][{"])
def test_no_part_of_a_call_is_shown_as_text(text):
    for end in range(len(text)):
        shown = text[: readable_part(text[:end])]
        assert parse(text, NAMES).text.startswith(shown)
    assert readable_part("A sentence < and more") > 10


def test_how_calls_begin():
    assert opening("... <tool_call> ...", None) == '<tool_call>\n{"name": "'
    assert opening("... <tool_call> ...", "add") == '<tool_call>\n{"name": "add", "arguments": '
    assert opening("... [TOOL_CALLS] ...", "add") == '[TOOL_CALLS][{"name": "add", "arguments": '
    assert opening('... "parameters" ...', "add") == '{"name": "add", "parameters": '


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_a_template_without_tools_raises_what_langchain_users_expect():
    llm, _ = make()
    with pytest.raises(NotImplementedError, match="no place for tools"):
        llm.bind_tools([add])
    with pytest.raises(NotImplementedError):
        llm.with_structured_output(Person, method="function_calling")


def test_a_tool_that_does_not_exist_cannot_be_chosen():
    llm = ChatBlend(engine=WatchedEngine("tools"))
    with pytest.raises(ValueError, match="'sub'"):
        llm.bind_tools([add], tool_choice="sub")
    chosen = {"type": "function", "function": {"name": "add"}}
    assert llm.bind_tools([add], tool_choice=chosen).kwargs["tool_choice"] == "add"
    assert "tool_choice" not in llm.bind_tools([add], tool_choice="auto").kwargs
    assert "tools" not in llm.bind_tools([add], tool_choice="none").kwargs


def test_a_stream_shows_the_text_and_then_the_calls():
    words = ("Let me", " see.", "\n<tool", "_call>", CALL.removeprefix("<tool_call>"))
    llm = ChatBlend(engine=WatchedEngine("tools", words=words))
    chunks = list(llm.bind_tools([add]).stream("p"))
    assert [chunk.content for chunk in chunks] == ["Let me", " see.", ""]
    assert [(call["name"], call["args"]) for call in chunks[-1].tool_calls] == [("add", {"a": 1})]
    cut = ChatBlend(engine=WatchedEngine("tools", words=words[:-1])).bind_tools([add])
    (*_, last) = cut.stream("p")
    assert not last.tool_calls
    assert len(last.invalid_tool_calls) == 1


def test_calls_and_results_reach_the_template():
    engine = WatchedEngine("tools")
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "abc123", "type": "tool_call"}
    messages = [
        HumanMessage("What is 1 + 2?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("3", tool_call_id="abc123"),
    ]
    ChatBlend(engine=engine).bind_tools([add]).invoke(messages)
    prompt = engine.calls[0].prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in prompt
    assert '"description": "Add two numbers."' in prompt


# --- structured output


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def answering():
    """Makes chat models without tools that answer a fixed text."""
    with scripted_engine(lambda prompt: '"name": "Ann", "age": 5}', kind="chat") as engine:

        def answer(text):
            engine.script = lambda prompt: text
            return ChatBlend(engine=engine)

        yield answer


@pytest.mark.parametrize("method", [None, "json_schema", "json_mode"])
def test_without_tools_the_answer_is_made_to_begin_as_json(answering, method):
    llm = answering('"name": "Ann", "age": 5}')
    assert llm.with_structured_output(Person, method=method).invoke("Who?") == Person(name="Ann", age=5)
    schema = Person.model_json_schema()
    assert llm.with_structured_output(schema, method=method).invoke([("human", "Who?")]) == {"name": "Ann", "age": 5}


def test_the_schema_stands_behind_the_question_where_it_leaves_the_head_alone():
    llm, engine = make(words=('"name": "Ann", "age": 5}',))
    llm.with_structured_output(Person).invoke([("system", "Be kind."), ("human", "Who?")])
    prompt = engine.calls[0].prompt
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?\n\nAnswer with a JSON")
    assert prompt.endswith("<|im_start|>assistant\n{")
    assert '"age"' in prompt


def test_an_answer_that_does_not_fit_is_langchains_own_error(answering):
    llm = answering('"name": "Ann"}')
    with pytest.raises(OutputParserException):
        llm.with_structured_output(Person).invoke("Who?")
    result = llm.with_structured_output(Person, include_raw=True).invoke("Who?")
    assert result["raw"].content == '{"name": "Ann"}'
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    with pytest.raises(ValueError, match="unsupported"):
        llm.with_structured_output(Person, tools=[])


def test_with_tools_it_is_a_call():
    with scripted_engine(obedient) as engine:
        llm = ChatBlend(engine=engine)
        assert llm.with_structured_output(Person).invoke("Who is 'Ann'?") == Person(name="Ann", age=3)


# --- without weights


def test_tools_heads_and_counts_need_no_weights(tmp_path):
    llm = ChatBlend(model=save_toy(tmp_path / "model", "tools"), storage=str(tmp_path / "kv"))
    llm.bind_tools([add])
    assert llm.get_num_tokens("river") > 0
    assert llm.head_of("<|im_start|>system\nRead this:\n")
    assert llm.loaded_engine is None
    assert llm.invoke("river", max_tokens=2).usage_metadata["output_tokens"] <= 2
    llm.close()
