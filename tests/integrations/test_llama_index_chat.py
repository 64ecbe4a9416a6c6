# ruff: noqa: F811  (fixtures are imported)
"""Chat engines, heads learned from engines, and what is reused from turn to turn."""

import asyncio
import itertools
import logging

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import PromptTemplate, Settings
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.llms.rag_blend import BlendLLM
from toy_llama_index import (
    BOS,
    CHAT_TEMPLATE,
    are_cached,
    byte_tokenizer,
    documents,
    llm_text,
    make_index,
    one_thread,  # noqa: F401
    recorder,  # noqa: F401
    tiny_model,
)

from rag_blend import BlendEngine
from rag_blend.prefixes import PrefixCache

MODES = [ChatMode.SIMPLE, ChatMode.CONTEXT, ChatMode.CONDENSE_QUESTION, ChatMode.CONDENSE_PLUS_CONTEXT, ChatMode.BEST]
CONTEXT_MODES = [ChatMode.CONTEXT, ChatMode.CONDENSE_PLUS_CONTEXT]


@pytest.fixture(params=["chat", "text"])
def llm(request, monkeypatch):
    tokenizer = byte_tokenizer(BOS + CHAT_TEMPLATE if request.param == "chat" else None)
    with BlendEngine(tiny_model(layers=2), tokenizer, storage=None, prime="none") as engine:
        made = BlendLLM(engine=engine, max_new_tokens=4)
        monkeypatch.setattr(Settings, "_llm", made)
        yield made


async def talk(chat, message):
    """The four ways to say something; the answers as text."""
    answers = [str(chat.chat(message)), str(await chat.achat(message))]
    answers.append("".join(chat.stream_chat(message).response_gen))
    stream = await chat.astream_chat(message)
    answers.append("".join([piece async for piece in stream.async_response_gen()]))
    return answers


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_every_mode_talks_in_every_way_and_remembers(llm, mode):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    chat = index.as_chat_engine(llm=llm, chat_mode=mode)
    answers = asyncio.run(talk(chat, "What do bees do?"))
    assert len(answers) == 4
    roles = [message.role.value for message in chat.chat_history]
    assert roles == ["user", "assistant"] * 4
    assert [message.content for message in chat.chat_history][1::2] == answers


@pytest.mark.parametrize("mode", ["react", "openai"])
def test_modes_that_llama_index_has_removed_are_refused_by_it(llm, mode):
    with pytest.raises(ValueError, match="deprecated and removed"):
        make_index(documents()).as_chat_engine(llm=llm, chat_mode=mode)


# --- turns


@pytest.mark.parametrize("mode", CONTEXT_MODES, ids=lambda mode: mode.value)
def test_earlier_turns_are_an_exact_prefix(llm, mode, recorder):
    """Where nothing was blended: the chunks are not cached for this prompt, or it has none."""
    chat = make_index(documents("bees")).as_chat_engine(llm=llm, chat_mode=mode)
    answered = []
    for message in ("What do bees do?", "And in winter?", "Why?"):
        chat.chat(message)
        answered.append(recorder.events[-1])
    assert answered[0].prefix_tokens == 0
    for before, now in itertools.pairwise(answered):
        assert now.prefix_tokens >= before.prompt_tokens - 12  # the role of the answer may be spelt otherwise
        assert now.fresh_tokens < 60
        assert now.mode == "prefix"


def test_a_plain_conversation_is_an_exact_prefix(llm, recorder):
    chat = make_index(documents("bees")).as_chat_engine(llm=llm, chat_mode="simple")
    for message in ("What do bees do, if one may ask?", "And in winter?"):
        chat.chat(message)
    first, second = recorder.events
    assert second.prefix_tokens >= first.prompt_tokens - 12 > 16


@pytest.mark.parametrize("mode", CONTEXT_MODES, ids=lambda mode: mode.value)
def test_chunks_cached_for_a_chat_engine_are_reused_in_every_turn(llm, mode, recorder):
    index = make_index(documents())
    chat = index.as_chat_engine(llm=llm, chat_mode=mode, similarity_top_k=3, system_prompt="Be kind.")
    assert llm.attach(index, engine=chat, show_progress=False).chunks >= 4
    assert not recorder.events  # the model was not asked
    assert not chat.chat_history
    for message in ("What do bees do?", "And in winter?"):
        chat.chat(message)
        event = recorder.events[-1]
        assert event.mode == "blend"
        assert event.hits >= 3
        assert not event.misses
        assert event.prefix_tokens >= len(llm.head(engine=chat)) > 40
        assert event.reused_tokens > 100


# --- heads


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate", "simple_summarize"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_head_of_an_engine_is_the_start_of_its_prompts(llm, mode, streaming, monkeypatch):
    if streaming and mode == "accumulate":
        pytest.skip("LlamaIndex does not stream there")
    index = make_index(documents("bees"))
    asked = []
    generate, stream = llm.engine.generate, llm.engine.stream
    monkeypatch.setattr(llm.engine, "generate", lambda *a, **k: (asked.append((a[0], k)), generate(*a, **k))[1])
    monkeypatch.setattr(llm.engine, "stream", lambda *a, **k: (asked.append((a[0], k)), stream(*a, **k))[1])
    engine = index.as_query_engine(llm=llm, response_mode=mode, streaming=streaming)
    head = llm.head(engine=engine)
    assert not asked
    str(engine.query("Why?"))
    prompt, options = asked[0]
    ids = llm.engine.tokenizer(prompt, add_special_tokens=options["add_special_tokens"] is None)["input_ids"]
    assert ids[: len(head)] == head
    assert llm.engine.tokenizer.decode(ids[len(head) :]).lstrip("\n").startswith("topic: ")
    if mode in ("compact", "refine", "accumulate"):
        assert head == llm.head()


def test_heads_of_other_engines(llm):
    index = make_index(documents("bees"))
    engine = index.as_query_engine(llm=llm)
    assert llm.head(engine=index.as_chat_engine(llm=llm, chat_mode="condense_question")) == llm.head()
    assert llm.head(engine=get_response_synthesizer(llm=llm)) == llm.head()
    assert llm.head(engine=TransformQueryEngine(engine, query_transform=lambda query, **_: query)) == llm.head()
    with pytest.raises(TypeError, match="RouterQueryEngine"):
        llm.head(engine=RouterQueryEngine(selector=None, query_engine_tools=[], llm=llm))
    with pytest.raises(TypeError, match="SimpleChatEngine"):
        llm.head(engine=index.as_chat_engine(llm=llm, chat_mode="simple"))
    with pytest.raises(ValueError, match="no prompt shows the context"):
        llm.head(engine=index.as_query_engine(llm=llm, response_mode="generation"))
    with pytest.raises(ValueError, match="one of head, text_qa_template and engine"):
        llm.attach(index, head="Facts:", engine=engine)


def test_one_index_can_be_attached_for_several_heads(llm):
    index = make_index(documents("bees"))
    chat = index.as_chat_engine(llm=llm, chat_mode="context")
    llm.attach(index, show_progress=False)
    llm.attach(index, engine=chat, show_progress=False)
    heads = [llm.head(), llm.head(engine=chat)]
    index.insert(documents("bread")[0])
    assert [are_cached(llm, [llm_text("bees"), llm_text("bread")], head) for head in heads] == [[True, True]] * 2
    index.delete_ref_doc("bread")
    assert [are_cached(llm, [llm_text("bees"), llm_text("bread")], head) for head in heads] == [[True, False]] * 2


def test_a_changed_template_is_noticed_once(llm, caplog, recorder, monkeypatch):
    monkeypatch.setattr(llm.engine, "_prefixes", PrefixCache(0))  # or the second question would need no chunks
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    template = PromptTemplate("Some facts, to be used with care:\n{context_str}\nQ: {query_str}")
    with caplog.at_level(logging.WARNING):
        str(index.as_query_engine(llm=llm).query("bees?"))
        assert "cached behind" not in caplog.text
        changed = index.as_query_engine(llm=llm, text_qa_template=template)
        str(changed.query("bees?"))
        str(changed.query("bread?"))
    assert caplog.text.count("begins with another text than they were cached behind") == 1
    event = recorder.events[-1]
    assert (event.hits, event.misses > 0) == (0, True)
    assert "begins with another text" in event.note
    llm.attach(index, engine=changed, show_progress=False)
    str(changed.query("bees?"))
    assert recorder.events[-1].hits >= 2
    assert "another text" not in recorder.events[-1].note


# --- packing


def test_llama_index_packs_with_the_models_tokenizer(llm, monkeypatch, recorder):
    """Chunks cut by the packer are reused as far as they go, and no prompt is too long."""
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    Settings.tokenizer = llm.tokenizer
    assert Settings.tokenizer("<s>abc") == llm.engine.tokenizer("<s>abc", add_special_tokens=False)["input_ids"]
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    llm.engine.context_window = 1200
    try:
        small = BlendLLM(engine=llm.engine, max_new_tokens=4)
        small.handle.heads.add(llm.head())
        assert 1200 > small.metadata.context_window > 1050
        str(index.as_query_engine(llm=small, similarity_top_k=4).query("bees?"))
    finally:
        llm.engine.context_window = 4096
    assert len(recorder.events) > 1
    assert all(event.prompt_tokens < 1200 for event in recorder.events)
    first = recorder.events[0]
    assert first.prefix_tokens + first.reused_tokens + first.recomputed_tokens > first.prompt_tokens / 2


def test_the_reserve_covers_the_llms_own_prompts(llm):
    plain = llm.metadata.context_window
    kind = BlendLLM(engine=llm.engine, system_prompt="Be kind. " * 40)
    assert plain - kind.metadata.context_window >= 9 * 40 - 10


def test_memory_limits_are_in_the_models_tokens(llm):
    memory = ChatMemoryBuffer.from_defaults(token_limit=60, tokenizer_fn=llm.tokenizer)
    chat = make_index(documents("bees")).as_chat_engine(llm=llm, chat_mode="simple", memory=memory)
    for _ in range(4):
        chat.chat("What do bees do in the winter?")
    assert len(memory.get_all()) == 8
    assert len(memory.get()) < 8
