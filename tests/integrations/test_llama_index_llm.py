"""BlendLLM against LlamaIndex's LLM contract, on an engine whose steps can be watched and made to fail."""

import asyncio
import copy
import gc
import pickle
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.rag_blend import BlendLLM
from llama_index.llms.rag_blend import engine_handle as engine_handle_module
from llama_index.llms.rag_blend.options import generation_options
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rag_blend import Generation, GenerationStats, RagBlendError

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}" + CHAT_TEMPLATE
)
DROPS_SYSTEM = CHAT_TEMPLATE.replace("messages %}", "messages if m.role != 'system' %}", 1)
FIRST_SYSTEM_ONLY = CHAT_TEMPLATE.replace("messages %}", "messages if m.role != 'system' or loop.first %}", 1).replace(
    "loop.first", "m == messages[0]"
)


def byte_tokenizer(chat_template=None):
    """A tokenizer with one token per byte that puts <s> in front of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def stats_of(prompt):
    return GenerationStats(
        prompt_tokens=100, prefix_tokens=10, reused_tokens=60, recomputed_tokens=5, fresh_tokens=30,
        recompute_ratio=0.08, mode="blend", ttft_s=0.1, load_s=0.01, hits=2, misses=0,
    )  # fmt: skip


class WatchedStream:
    """Yields the engine's words; one step per word, counted."""

    def __init__(self, engine, cancel):
        self.engine, self.cancel = engine, cancel or threading.Event()
        self.stats, self.token_ids = None, []
        self._words = iter(engine.words)

    def __iter__(self):
        return self

    def __next__(self):
        if self.cancel.is_set() or self.engine.closed_streams:
            raise StopIteration
        time.sleep(self.engine.step_s)
        self.engine.steps += 1
        if self.engine.steps == self.engine.fail_at:
            raise RuntimeError("out of memory")
        word = next(self._words)
        self.stats = stats_of("")
        self.token_ids.append(len(self.token_ids))
        return word

    def close(self):
        if not self.engine.closed_streams:
            self.engine.closed_streams += 1


@dataclass
class WatchedEngine:
    """Stands in for BlendEngine."""

    tokenizer: object = field(default_factory=byte_tokenizer)
    words: tuple = ("one", " two", " three")
    step_s: float = 0.0
    fail_at: int = 0
    model_name: str = "watched"
    context_window: int = 4096
    policy: object = field(default_factory=lambda: SimpleNamespace(full_prefill=False))
    steps: int = 0
    closed_streams: int = 0
    calls: list = field(default_factory=list)

    def generate(self, prompt, add_special_tokens=None, cancel=None, **options):
        stream = self.stream(prompt, add_special_tokens, cancel, **options)
        return Generation(text="".join(stream), token_ids=stream.token_ids, stats=stats_of(prompt))

    def stream(self, prompt, add_special_tokens=None, cancel=None, **options):
        thread = threading.current_thread().name
        self.calls.append(SimpleNamespace(prompt=prompt, special=add_special_tokens, thread=thread, **options))
        return WatchedStream(self, cancel)


def make_llm(chat_template=None, llm_options=None, **engine_options):
    engine = WatchedEngine(tokenizer=byte_tokenizer(chat_template), **engine_options)
    return BlendLLM(engine=engine, **(llm_options or {})), engine


def with_tokenizer_of(monkeypatch, tokenizer):
    """Let any model name stand for a model with this tokenizer."""
    loader = SimpleNamespace(from_pretrained=lambda model, **options: tokenizer)
    monkeypatch.setattr(engine_handle_module, "AutoTokenizer", loader)


def user(text):
    return ChatMessage(role=MessageRole.USER, content=text)


def system(text):
    return ChatMessage(role=MessageRole.SYSTEM, content=text)


def wait_until_idle(engine, within=2.0):
    """Return the number of steps once it stays the same."""
    deadline, seen = time.monotonic() + within, -1
    while seen != engine.steps:
        assert time.monotonic() < deadline, "the computation goes on"
        seen = engine.steps
        time.sleep(0.1)
    return seen


# --- the class


def test_it_is_a_llama_index_llm_with_its_own_name():
    assert BaseLLM in BlendLLM.__mro__
    assert BlendLLM.class_name() == "rag_blend_llm"


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="tokenizer_name"):
        BlendLLM(model="somewhere", tokenizer_name="elsewhere")


def test_a_model_or_an_engine_is_needed_but_not_both():
    with pytest.raises(ValueError, match="either"):
        BlendLLM(model="somewhere", engine=WatchedEngine())
    with pytest.raises(ValueError, match="needs a model"):
        _ = BlendLLM().metadata


def test_to_dict_holds_configuration_only():
    llm, _ = make_llm()
    llm.complete("x")
    data = llm.to_dict()
    assert data["class_name"] == "rag_blend_llm"
    assert len(repr(data)) < 1000
    assert not any("engine" in str(value) for value in data.values())


# --- metadata


def test_metadata_reads_config_files_and_no_weights(monkeypatch):
    asked = []

    def info(model):
        asked.append(model)
        return SimpleNamespace(name="tiny", context_window=8192, has_chat_template=True)

    monkeypatch.setattr(engine_handle_module, "read_model_info", info)
    with_tokenizer_of(monkeypatch, byte_tokenizer(CHAT_TEMPLATE))
    llm = BlendLLM(model="somewhere", max_new_tokens=100)
    for _ in range(3):
        metadata = llm.metadata
    assert asked == ["somewhere"]
    assert llm._handle._engine is None
    assert (metadata.model_name, metadata.is_chat_model, metadata.num_output) == ("tiny", True, 100)
    assert 8192 - 256 < metadata.context_window < 8192


def test_metadata_can_be_overridden():
    llm, _ = make_llm(CHAT_TEMPLATE, {"context_window": 1000, "is_chat_model": False})
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (1000, False)


# --- prompts


def test_complete_sends_a_plain_prompt_as_it_is():
    llm, engine = make_llm()
    assert llm.complete("Hello").text == "one two three"
    assert (engine.calls[0].prompt, engine.calls[0].special) == ("Hello", None)


def test_complete_makes_one_user_message_for_a_chat_model():
    llm, engine = make_llm(CHAT_TEMPLATE)
    llm.complete("Hello")
    assert (engine.calls[0].prompt, engine.calls[0].special) == ("<s>[user]Hello\n[assistant]", False)
    llm.complete("<s>[user]Hello\n[assistant]", formatted=True)
    assert (engine.calls[1].prompt, engine.calls[1].special) == ("<s>[user]Hello\n[assistant]", None)


def test_chat_uses_the_template_once_and_one_bos():
    llm, engine = make_llm(CHAT_TEMPLATE)
    llm.chat([system("Be kind."), user("Hello")])
    call = engine.calls[0]
    assert call.prompt == "<s>[system]Be kind.\n[user]Hello\n[assistant]"
    ids = engine.tokenizer(call.prompt, add_special_tokens=call.special)["input_ids"]
    assert ids.count(0) == 1


def test_chat_without_a_template_joins_the_messages_as_llama_index_does():
    llm, engine = make_llm()
    llm.chat([system("Be kind."), user("Hello")])
    assert (engine.calls[0].prompt, engine.calls[0].special) == (
        "system: Be kind.\nuser: Hello\nassistant: ",
        None,
    )


def test_an_empty_message_is_answered():
    llm, engine = make_llm(CHAT_TEMPLATE)
    assert llm.complete("").text
    assert llm.chat([user("")]).message.content
    assert engine.calls[0].prompt == "<s>[user]\n[assistant]"


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_system_text_goes_into_the_first_user_message_where_the_template_has_no_place_for_it(template):
    llm, engine = make_llm(template)
    llm.chat([system("Be kind."), system("Be short."), user("Hello"), user("there")])
    assert engine.calls[0].prompt == "<s>[user]Be kind.\n\nBe short.\n\nHello\n\nthere\n[assistant]"


def test_two_system_messages_are_joined_where_the_template_shows_only_the_first():
    llm, engine = make_llm(FIRST_SYSTEM_ONLY)
    llm.chat([system("Be kind."), system("Be short."), user("Hello")])
    assert engine.calls[0].prompt == "<s>[system]Be kind.\n\nBe short.\n[user]Hello\n[assistant]"


def test_messages_are_left_alone_where_the_template_takes_them():
    llm, engine = make_llm(CHAT_TEMPLATE)
    llm.chat([system("A"), system("B"), user("C"), user("D")])
    assert engine.calls[0].prompt == "<s>[system]A\n[system]B\n[user]C\n[user]D\n[assistant]"


def test_a_conversation_that_no_form_fits_is_an_error_that_quotes_the_template():
    llm, _ = make_llm(CHAT_TEMPLATE + "{{ raise_exception('only on Sundays') }}")
    with pytest.raises(RagBlendError, match="only on Sundays"):
        llm.chat([user("Hello")])


def test_images_and_empty_conversations_are_refused():
    llm, _ = make_llm(CHAT_TEMPLATE)
    with pytest.raises(RagBlendError, match="text only"):
        llm.chat([ChatMessage(role="user", content=[TextBlock(text="a"), ImageBlock(image=b"R0lGODlh")])])
    with pytest.raises(RagBlendError, match="at least one"):
        llm.chat([])


def test_template_variables_and_own_functions_are_used():
    llm, engine = make_llm("{{ mood }}" + CHAT_TEMPLATE, {"chat_template_kwargs": {"mood": "calm"}})
    llm.complete("Hello")
    assert engine.calls[0].prompt.startswith("calm<s>")
    llm, engine = make_llm(CHAT_TEMPLATE, {"messages_to_prompt": lambda messages: f"<<{len(messages)}>>"})
    llm.chat([user("a"), user("b")])
    assert (engine.calls[0].prompt, engine.calls[0].special) == ("<<2>>", None)
    llm, engine = make_llm(CHAT_TEMPLATE, {"completion_to_prompt": lambda prompt: f"<<{prompt}>>"})
    llm.complete("a")
    assert engine.calls[0].prompt == "<<a>>"


def test_predict_puts_the_system_prompt_in_front():
    llm, engine = make_llm(CHAT_TEMPLATE, {"system_prompt": "Be kind."})
    assert llm.predict(PromptTemplate("Say {word}"), word="hi") == "one two three"
    assert engine.calls[0].prompt == "<s>[system]Be kind.\n[user]Say hi\n[assistant]"


# --- options


@pytest.mark.parametrize(
    ("defaults", "call", "expected"),
    [
        ({}, {}, {"max_new_tokens": 7}),
        ({}, {"max_tokens": 3, "stop": "x"}, {"max_new_tokens": 3, "stop": ["x"]}),
        ({"max_new_tokens": 5}, {"stop": ["a", "b"]}, {"max_new_tokens": 5, "stop": ["a", "b"]}),
        ({}, {"temperature": 0}, {"max_new_tokens": 7, "do_sample": False}),
        ({}, {"temperature": 0.5}, {"max_new_tokens": 7, "temperature": 0.5, "do_sample": True}),
        ({}, {"temperature": None}, {"max_new_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0}, {"max_new_tokens": 7, "do_sample": False}),
        ({"temperature": 0.5, "do_sample": False}, {}, {"max_new_tokens": 7, "do_sample": False}),
        (
            {"do_sample": False},
            {"temperature": 0.5},
            {"max_new_tokens": 7, "temperature": 0.5, "do_sample": True},
        ),
    ],
)
def test_call_arguments_win_and_the_temperature_decides_about_sampling(defaults, call, expected):
    assert generation_options(defaults, call, 7) == expected


def test_every_endpoint_passes_the_options_on():
    llm, engine = make_llm(llm_options={"generate_kwargs": {"top_k": 5}})
    call = {"stop": "x", "max_tokens": 9, "temperature": 0.5}

    async def drain(stream):
        return [chunk async for chunk in await stream]

    llm.complete("p", **call)
    llm.chat([user("p")], **call)
    list(llm.stream_complete("p", **call))
    list(llm.stream_chat([user("p")], **call))
    asyncio.run(llm.acomplete("p", **call))
    asyncio.run(llm.achat([user("p")], **call))
    asyncio.run(drain(llm.astream_complete("p", **call)))
    asyncio.run(drain(llm.astream_chat([user("p")], **call)))
    assert len(engine.calls) == 8
    for made in engine.calls:
        assert (made.stop, made.max_new_tokens, made.temperature, made.do_sample, made.top_k) == (
            ["x"],
            9,
            0.5,
            True,
            5,
        )


# --- responses

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 70},
}


def test_raw_holds_usage_and_figures_as_plain_values():
    llm, _ = make_llm()
    raw = llm.complete("p").raw
    assert raw["usage"] == USAGE
    assert raw["rag_blend"]["mode"] == "blend"
    assert llm.chat([user("p")]).raw == raw
    assert pickle.loads(pickle.dumps(raw)) == raw


def test_streams_carry_deltas_the_text_so_far_and_the_usage_at_the_end():
    llm, _ = make_llm()
    chunks = list(llm.stream_complete("p"))
    assert [chunk.delta for chunk in chunks] == ["one", " two", " three", ""]
    assert [chunk.text for chunk in chunks] == ["one", "one two", "one two three", "one two three"]
    assert [chunk.raw is None for chunk in chunks] == [True, True, True, False]
    assert chunks[-1].raw["usage"] == USAGE

    llm, _ = make_llm()
    chats = list(llm.stream_chat([user("p")]))
    assert [chat.delta for chat in chats] == [chunk.delta for chunk in chunks]
    assert [chat.message.content for chat in chats] == [chunk.text for chunk in chunks]
    assert chats[-1].message.role == MessageRole.ASSISTANT
    assert chats[-1].raw == chunks[-1].raw


def test_llama_index_counts_the_models_own_tokens():
    counter = TokenCountingHandler(tokenizer=lambda text: 1 / 0)  # any fallback would fail
    llm, _ = make_llm(llm_options={"callback_manager": CallbackManager([counter])})
    llm.complete("p")
    list(llm.stream_chat([user("p")]))
    assert counter.prompt_llm_token_count == 200
    assert counter.completion_llm_token_count == 6


def test_async_streams_yield_the_same():
    async def run():
        llm, _ = make_llm()
        completions = [chunk async for chunk in await llm.astream_complete("p")]
        llm, _ = make_llm()
        chats = [chunk async for chunk in await llm.astream_chat([user("p")])]
        return completions, chats

    completions, chats = asyncio.run(run())
    assert [chunk.delta for chunk in completions] == ["one", " two", " three", ""]
    assert [chat.delta for chat in chats] == ["one", " two", " three", ""]
    assert completions[-1].raw["usage"] == chats[-1].raw["usage"] == USAGE


# --- the event loop stays free


@pytest.mark.parametrize("endpoint", ["acomplete", "achat", "astream_complete", "astream_chat"])
def test_the_event_loop_ticks_during_generation(endpoint):
    llm, engine = make_llm(words=("w",) * 10, step_s=0.02)

    async def run():
        ticks, done = 0, asyncio.Event()

        async def tick():
            nonlocal ticks
            while not done.is_set():
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        result = await getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")])
        if "stream" in endpoint:
            async for _ in result:
                pass
        done.set()
        await ticker
        return ticks

    assert asyncio.run(run()) >= 5
    assert engine.calls[0].thread != threading.main_thread().name


def test_tokens_arrive_one_by_one():
    llm, _ = make_llm(words=("w",) * 5, step_s=0.05)

    async def run():
        start = time.monotonic()
        return [time.monotonic() - start async for _ in await llm.astream_complete("p")]

    times = asyncio.run(run())
    assert times[0] < 0.15
    assert times[-1] - times[0] > 0.1


# --- whoever stops listening stops the computation

LONG = {"words": ("w",) * 400, "step_s": 0.005}


@pytest.mark.parametrize("endpoint", ["stream_complete", "stream_chat"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_leaving_a_stream_stops_it(endpoint, how):
    llm, engine = make_llm(**LONG)
    stream = getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")])
    next(stream)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert engine.closed_streams == 1


def test_a_stream_nobody_reads_computes_nothing():
    llm, engine = make_llm()
    stream = llm.stream_complete("p")
    stream.close()
    assert not engine.calls


@pytest.mark.parametrize("endpoint", ["astream_complete", "astream_chat"])
@pytest.mark.parametrize("how", ["aclose", "break", "cancel"])
def test_leaving_an_async_stream_stops_it(endpoint, how):
    llm, engine = make_llm(**LONG)

    async def read(limit):
        stream = await getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")])
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == limit:
                break
        if how == "aclose":
            await stream.aclose()

    async def run():
        if how == "cancel":
            task = asyncio.create_task(read(10**6))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await read(2)
        await asyncio.sleep(0.1)
        return wait_until_idle(engine)

    assert asyncio.run(run()) < 200
    assert engine.closed_streams == 1


@pytest.mark.parametrize("endpoint", ["acomplete", "achat"])
def test_cancelling_the_task_stops_the_computation(endpoint):
    llm, engine = make_llm(**LONG)

    async def run():
        task = asyncio.create_task(getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return wait_until_idle(engine)

    assert 0 < asyncio.run(run()) < 200


# --- failures reach the consumer


@pytest.mark.parametrize("endpoint", ["complete", "chat", "stream_complete", "stream_chat"])
def test_failures_are_raised(endpoint):
    llm, _ = make_llm(fail_at=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        result = getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")])
        list(result)


@pytest.mark.parametrize("endpoint", ["acomplete", "achat", "astream_complete", "astream_chat"])
def test_failures_are_raised_in_async_calls(endpoint):
    llm, _ = make_llm(fail_at=2)

    async def run():
        result = await getattr(llm, endpoint)("p" if "complete" in endpoint else [user("p")])
        if "stream" in endpoint:
            async for _ in result:
                pass

    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(asyncio.wait_for(run(), 5))


# --- one engine, made late


def test_the_engine_is_made_once_on_first_use_with_the_configuration(monkeypatch):
    made = []

    class Factory:
        @staticmethod
        def from_pretrained(model, **options):
            time.sleep(0.05)
            made.append((model, options))
            return WatchedEngine()

    facts = SimpleNamespace(name="tiny", context_window=512, has_chat_template=False)
    monkeypatch.setattr("llama_index.llms.rag_blend.base.BlendEngine", Factory)
    monkeypatch.setattr(engine_handle_module, "read_model_info", lambda model: facts)
    with_tokenizer_of(monkeypatch, byte_tokenizer())
    llm = BlendLLM("somewhere", storage="x/", recompute_ratio=0.5, engine_options={"device": "cpu"})
    assert not made
    threads = [threading.Thread(target=llm.complete, args=("p",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [
        (
            "somewhere",
            {
                "storage": "x/",
                "selector": "anchor",
                "recompute_ratio": 0.5,
                "prime": "sample",
                "namespace": "default",
                "device": "cpu",
            },
        )
    ]


def test_copies_share_the_engine():
    llm, engine = make_llm()
    for other in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(update={"max_new_tokens": 5})):
        assert other.engine is engine


def test_a_pickled_llm_keeps_its_configuration_and_loads_its_own_engine():
    llm = BlendLLM("somewhere", storage="x/", system_prompt="Be kind.", generate_kwargs={"top_k": 3})
    other = pickle.loads(pickle.dumps(llm))
    assert other.to_dict() == llm.to_dict()
    assert other.model == "somewhere"
    assert other._handle is not llm._handle
    assert not other._handle.given


def test_an_llm_on_an_engine_object_says_why_it_cannot_be_pickled():
    llm, _ = make_llm()
    with pytest.raises(TypeError, match="built from an engine object"):
        pickle.dumps(llm)
