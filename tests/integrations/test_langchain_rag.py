"""LangChain's own chains, stores and agents on real engines with tiny random models."""

import asyncio
import itertools
import logging

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("langchain_classic")
pytest.importorskip("langchain.agents")

import torch
from conftest import random_text
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableParallel, RunnablePassthrough
from langchain_core.tracers import context as tracer_context
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_blend import BlendCallbackHandler, BlendLLM, BlendVectorStore, ChatBlend, PrecomputeKV
from langchain_rag_blend.contexts import HeadMemory
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langchain_toys import LetterEmbeddings, Recorder, add_tool, obedient, scripted_engine, toy_engine

from rag_blend import BlendEngine

INSTRUCTIONS = random_text(99, 40)
PROMPT = ChatPromptTemplate.from_messages([("system", INSTRUCTIONS + "\n\nContext:\n{context}"), ("human", "{input}")])
TEXTS = [random_text(seed) for seed in range(4)]
QUESTION = "What is the river?"


def documents(texts=TEXTS):
    return [Document(f"  {text}\n", metadata={"source": f"f{i}.txt"}, id=f"d{i}") for i, text in enumerate(texts)]


def format_docs(docs):
    return "\n\n".join(doc.page_content for doc in docs)


@pytest.fixture
def engine():
    with toy_engine(selector="heads") as engine:
        yield engine


@pytest.fixture
def llm(engine):
    return ChatBlend(engine=engine, max_tokens=6, temperature=0)


def blend_store(llm, prompt=PROMPT, docs=None, **options):
    store = BlendVectorStore(InMemoryVectorStore(LetterEmbeddings()), llm, prompt, **options)
    store.add_documents(documents() if docs is None else docs)
    return store


def is_cached(engine, text, head=None):
    """Whether a text is cached behind a head; leaves the cache as it was."""
    cached = engine.ingest([text], head=head, doc_ids=["probe"], progress=False).chunks == 0
    engine.forget(["probe"])
    return cached


# --- the chains that people build


def retrieval_chain(llm, retriever):
    return create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT)).pick("answer"), {
        "input": QUESTION
    }


def titled_chain(llm, retriever):
    stuff = create_stuff_documents_chain(
        llm,
        PROMPT,
        document_prompt=PromptTemplate.from_template("[{source}] {page_content}"),
        document_separator="\n---\n",
    )
    return create_retrieval_chain(retriever, stuff).pick("answer"), {"input": QUESTION}


def lcel_chain(llm, retriever):
    gather = {"context": retriever | format_docs, "input": RunnablePassthrough()}
    return gather | PROMPT | llm | StrOutputParser(), QUESTION


def lcel_chain_without_format_docs(llm, retriever):
    return {"context": retriever, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser(), QUESTION


def history_chain(llm, retriever):
    turns = [
        ("system", INSTRUCTIONS + "\n\nContext:\n{context}"),
        MessagesPlaceholder("chat_history"),
        ("human", "{input}"),
    ]
    rephrase = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    aware = create_history_aware_retriever(llm, retriever, rephrase)
    stuff = create_stuff_documents_chain(llm, ChatPromptTemplate.from_messages(turns))
    history = [HumanMessage("Which mountain?"), AIMessage("The red one.")]
    return create_retrieval_chain(aware, stuff).pick("answer"), {"input": QUESTION, "chat_history": history}


CHAINS = {
    chain.__name__: chain
    for chain in (retrieval_chain, titled_chain, lcel_chain, lcel_chain_without_format_docs, history_chain)
}


def stock_answer(engine, call):
    """What the stock model says to the very tokens of a prompt."""
    tokenizer, model = engine.tokenizer, engine._model
    special = call.add_special_tokens
    special = not call.prompt.startswith(tokenizer.bos_token) if special is None else special
    ids = torch.tensor([tokenizer(call.prompt, add_special_tokens=special)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


async def call_by(endpoint, chain, given):
    if endpoint == "invoke":
        return chain.invoke(given)
    if endpoint == "stream":
        return "".join(chain.stream(given))
    if endpoint == "ainvoke":
        return await chain.ainvoke(given)
    if endpoint == "astream":
        return "".join([piece async for piece in chain.astream(given)])
    (answer,) = chain.batch([given])
    return answer


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("endpoint", ["invoke", "stream", "ainvoke", "astream", "batch"])
async def test_at_ratio_1_every_chain_answers_like_the_stock_model(kind, name, endpoint, monkeypatch):
    with toy_engine(kind, recompute_ratio=1.0) as engine:
        calls = Recorder(engine, monkeypatch).calls
        llm = (BlendLLM if kind == "text" else ChatBlend)(engine=engine, max_tokens=6, temperature=0)
        store = blend_store(llm)
        chain, given = CHAINS[name](llm, store.as_retriever())
        answer = await call_by(endpoint, chain, given)
        assert answer == stock_answer(engine, calls[-1])
        assert answer
        if "without" not in name:
            assert all(text in calls[-1].prompt for text in TEXTS)


@pytest.mark.parametrize(("name", "reused"), [(name, name != "lcel_chain_without_format_docs") for name in CHAINS])
def test_what_chains_reuse(name, reused, engine, llm, monkeypatch):
    calls = Recorder(engine, monkeypatch).calls
    chain, given = CHAINS[name](llm, blend_store(llm).as_retriever())
    assert isinstance(chain.invoke(given), str)
    stats = calls[-1].result.stats
    if reused:
        tokens = sum(len(engine.tokenizer(text)["input_ids"]) for text in TEXTS)
        assert stats.prefix_tokens + stats.reused_tokens > 0.8 * tokens
        assert (stats.hits, stats.misses) == (5, 0)  # the head is one
        assert stats.prefix_tokens > 16  # the head, exactly
    else:
        # One-line documents stand in the repr of a list as they are.
        assert stats.hits == 5


def test_documents_of_several_lines_without_format_docs_are_answered(engine, llm):
    store = blend_store(llm, docs=documents([text.replace(" stone", "\nstone") for text in TEXTS]))
    chain, given = lcel_chain_without_format_docs(llm, store.as_retriever())
    assert chain.invoke(given)


def test_two_chains_side_by_side(engine, llm, monkeypatch):
    calls = Recorder(engine, monkeypatch).calls
    retriever = blend_store(llm).as_retriever()
    (first, _), (second, given) = lcel_chain(llm, retriever), lcel_chain(llm.bind(max_tokens=3), retriever)
    both = RunnableParallel(first=first, second=second)
    answers = both.batch([given] * 3)
    assert len(calls) == 6
    assert all(answer == answers[0] for answer in answers)
    assert all(call.result.stats.hits == 5 for call in calls)


async def test_an_agent_with_retrieval_in_its_system_prompt(monkeypatch):
    with scripted_engine(obedient) as engine:
        calls = Recorder(engine, monkeypatch).calls
        llm = ChatBlend(engine=engine)
        llm.learn_head(f"<|im_start|>system\n{INSTRUCTIONS}\n\n")
        store = blend_store(llm, None)

        @dynamic_prompt
        def with_context(request):
            return f"{INSTRUCTIONS}\n\n" + format_docs(store.similarity_search(request.messages[-1].text))

        agent = create_agent(llm, tools=[add_tool], middleware=[with_context])
        result = await agent.ainvoke({"messages": [("human", QUESTION)]})
        assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "ai"]
        assert result["messages"][-1].content == "It is done."
        assert [call.result.stats.hits for call in calls] == [5, 5]

        plain = create_agent(ChatBlend(engine=engine), tools=[], middleware=[with_context])
        assert plain.invoke({"messages": [("human", QUESTION)]})["messages"][-1].content == "It is done."


# --- heads


@pytest.mark.parametrize("kind", ["chat", "tools", "text"])
def test_the_head_of_a_template_is_what_its_prompts_begin_with(kind, monkeypatch):
    with toy_engine(kind) as engine:
        calls = Recorder(engine, monkeypatch).calls
        llm = (BlendLLM if kind == "text" else ChatBlend)(engine=engine, max_tokens=1)
        head = llm.head_of(PROMPT)
        for context in ("A text.", "\nanother", "42"):
            (PROMPT | llm).invoke({"context": context, "input": QUESTION})
            ids = engine.tokenizer(calls[-1].prompt, add_special_tokens=kind == "text")["input_ids"]
            assert ids[: len(head)] == head
        shown = engine.tokenizer.decode(head)
        assert "Context:" in shown
        assert llm.head_of(shown.removeprefix("<s>")) == head
        assert llm.head_of(head) == head


def test_the_head_is_found_in_a_chain(llm):
    retriever = blend_store(llm, None).as_retriever()
    for name in ("retrieval_chain", "titled_chain", "lcel_chain"):
        chain, _ = CHAINS[name](llm, retriever)
        assert llm.head_of(chain) == llm.head_of(PROMPT)
    with pytest.raises(ValueError, match="variable 'documents'"):
        llm.head_of(chain, variable="documents")


def test_tools_stand_in_the_head():
    with toy_engine("tools") as engine:
        llm = ChatBlend(engine=engine)
        prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
        assert "add_tool" in engine.tokenizer.decode(llm.head_of(prompt, tools=[add_tool]))
        assert "add_tool" not in engine.tokenizer.decode(llm.head_of(prompt))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (ChatPromptTemplate.from_template("{input}: {context}"), "differs from prompt to prompt"),
        (
            ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{context}")]),
            "differs from prompt to prompt",
        ),
        (PromptTemplate.from_template("{input}"), "no variable 'context'"),
    ],
)
def test_a_template_without_a_fixed_head_says_so(llm, template, complaint):
    with pytest.raises(ValueError, match=complaint):
        llm.head_of(template)


def test_optional_and_partial_variables_are_no_obstacle(llm):
    template = ChatPromptTemplate.from_messages(
        [
            ("system", "Speak {language}.\n{context}"),
            MessagesPlaceholder("chat_history", optional=True),
            ("human", "{input}"),
        ]
    ).partial(language="French")
    assert "French" in llm.tokenizer.decode(llm.head_of(template))


def test_a_dated_head_is_reported(caplog):
    dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with toy_engine(dated) as engine:
        ChatBlend(engine=engine).head_of(PROMPT)
    assert "today's date" in caplog.text


def test_without_a_prompt_documents_serve_any_head(engine, llm, monkeypatch):
    calls = Recorder(engine, monkeypatch).calls
    chain, given = lcel_chain(llm, blend_store(llm, None).as_retriever())
    chain.invoke(given)
    assert calls[-1].result.stats.hits == 4
    assert calls[-1].result.stats.reused_tokens > 200


# --- the store


def test_the_store_is_a_vector_store_in_all_its_parts(llm):
    store = BlendVectorStore.from_documents(documents(), LetterEmbeddings(), llm=llm, prompt=PROMPT)
    assert is_cached(llm.engine, TEXTS[0], llm.head_of(PROMPT))
    assert store.get_by_ids(["d0"])[0].page_content.strip() == TEXTS[0]
    assert store.similarity_search(TEXTS[1], k=1)[0].id == "d1"
    assert store.similarity_search_with_score(TEXTS[1], k=1)[0][0].id == "d1"
    assert store.similarity_search_by_vector(store.embeddings.embed_query(TEXTS[1]), k=1)[0].id == "d1"
    assert store.max_marginal_relevance_search(TEXTS[1], k=1)[0].id == "d1"
    assert {doc.id for doc in store.as_retriever(search_type="mmr").invoke(TEXTS[1])} == {"d0", "d1", "d2", "d3"}
    assert store.store is store.inner.store  # the inner store's own attribute
    with pytest.raises(AttributeError):
        _ = store.nothing_of_the_kind
    named = BlendVectorStore.from_texts(TEXTS, LetterEmbeddings(), llm=llm)
    assert len(named.inner.store) == 4
    with pytest.raises(ValueError, match="llm="):
        BlendVectorStore.from_texts(TEXTS, LetterEmbeddings())


async def test_the_async_twins_do_the_same(llm):
    store = BlendVectorStore(InMemoryVectorStore(LetterEmbeddings()), llm)
    await store.aadd_documents(documents()[:2])
    await store.aadd_texts([TEXTS[2], TEXTS[3]], ids=["d2", "d3"])
    assert all(is_cached(llm.engine, text) for text in TEXTS)
    vector = store.embeddings.embed_query(TEXTS[1])
    for search in (
        store.asimilarity_search(TEXTS[1], k=1),
        store.asimilarity_search_by_vector(vector, k=1),
        store.amax_marginal_relevance_search(TEXTS[1], k=1),
        store.amax_marginal_relevance_search_by_vector(vector, k=1),
        store.aget_by_ids(["d1"]),
    ):
        assert [doc.id for doc in await search] == ["d1"]
    assert (await store.asimilarity_search_with_score(TEXTS[1], k=1))[0][0].id == "d1"
    await store.adelete(["d1"])
    assert not is_cached(llm.engine, TEXTS[1])
    assert is_cached(llm.engine, TEXTS[0])


async def test_caching_does_not_block_the_event_loop(llm):
    store = BlendVectorStore(InMemoryVectorStore(LetterEmbeddings()), llm)
    adding = asyncio.create_task(store.aadd_documents(documents([random_text(seed, 300) for seed in range(20)])))
    ticks = 0
    while not adding.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks >= 5


def test_what_is_overwritten_or_deleted_is_erased(llm):
    store = blend_store(llm, None)
    assert all(is_cached(llm.engine, text) for text in TEXTS)
    store.add_documents([Document(random_text(50), id="d0")])
    assert not is_cached(llm.engine, TEXTS[0])
    assert is_cached(llm.engine, random_text(50))
    store.add_texts([random_text(51)], ids=["d1"])
    assert not is_cached(llm.engine, TEXTS[1])
    store.delete(["d2"])
    assert not is_cached(llm.engine, TEXTS[2])
    assert is_cached(llm.engine, TEXTS[3])


def test_a_store_that_deletes_everything_takes_the_caches_along(llm):
    store = blend_store(llm, None)
    store.inner.store.clear()
    store.delete()
    assert not any(is_cached(llm.engine, text) for text in TEXTS)


def test_a_store_that_cannot_be_asked_is_followed_all_the_same(llm):
    class Mute(InMemoryVectorStore):
        def get_by_ids(self, ids):
            raise NotImplementedError

    store = BlendVectorStore(Mute(LetterEmbeddings()), llm)
    store.add_documents(documents())
    store.add_documents([Document(random_text(50), id="d0")])
    assert not is_cached(llm.engine, TEXTS[0])
    assert is_cached(llm.engine, random_text(50))
    store.delete()
    assert not is_cached(llm.engine, TEXTS[3])


def test_the_inner_store_goes_first(llm):
    class Broken(InMemoryVectorStore):
        def add_documents(self, documents, ids=None, **kwargs):
            raise ConnectionError("the store is away")

        def delete(self, ids=None, **kwargs):
            return False

    store = BlendVectorStore(Broken(LetterEmbeddings()), llm)
    with pytest.raises(ConnectionError):
        store.add_documents(documents())
    assert not is_cached(llm.engine, TEXTS[0])
    llm.engine.ingest(TEXTS, doc_ids=["d0", "d1", "d2", "d3"], progress=False)
    assert store.delete(["d0"]) is False
    assert is_cached(llm.engine, TEXTS[0])


def test_a_failing_cache_fails_no_addition_but_a_failing_erasure_is_raised(llm, monkeypatch, caplog):
    store = blend_store(llm, None)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(BlendEngine, "ingest", fail)
    assert store.add_documents([Document(random_text(60), id="new")]) == ["new"]
    assert "disk full" in caplog.text
    monkeypatch.setattr(BlendEngine, "forget", fail)
    with pytest.raises(OSError, match="disk full"):
        store.delete(["d0"])


def test_the_rest_is_cached_again_when_the_priming_text_goes(caplog):
    varied = [
        "The harbour master logs every vessel that passes the northern breakwater, with its tonnage.",
        "A colony of bees keeps its brood at thirty-five degrees, whatever the weather outside may be.",
        "Quartz oscillators drift with temperature, so marine chronometers sit in gimballed boxes.",
        "Rye doughs are sour because wild yeast and lactic bacteria grow together over two long days.",
    ]
    with toy_engine(prime="sample", prime_tokens=24) as engine:
        store = blend_store(ChatBlend(engine=engine), None, documents(varied))
        before = engine.num_chunks
        left = list(store.inner.store)
        while "being cached again" not in caplog.text:  # some of the documents is in the sample
            store.delete([left.pop()])
        assert engine.num_chunks == len(left) < before


def test_indexing_with_a_record_manager_is_followed(llm):
    engine, store = llm.engine, BlendVectorStore(InMemoryVectorStore(LetterEmbeddings()), llm)
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(texts):
        docs = [Document(text, metadata={"source": f"s{i}"}) for i, text in enumerate(texts)]
        return index(docs, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")

    assert run(TEXTS)["num_added"] == 4
    assert all(is_cached(engine, text) for text in TEXTS)
    assert run(TEXTS)["num_skipped"] == 4
    changed = run([random_text(70), *TEXTS[1:]])
    assert (changed["num_added"], changed["num_deleted"]) == (1, 1)
    assert not is_cached(engine, TEXTS[0])
    assert is_cached(engine, random_text(70))
    assert is_cached(engine, TEXTS[1])


async def test_async_indexing_is_followed(llm):
    engine, store = llm.engine, BlendVectorStore(InMemoryVectorStore(LetterEmbeddings()), llm)
    records = InMemoryRecordManager("test")
    await records.acreate_schema()
    docs = [Document(text, metadata={"source": "s"}) for text in TEXTS]
    options = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    await aindex(docs, records, store, **options)
    await aindex(docs[1:], records, store, **options)
    assert not is_cached(engine, TEXTS[0])
    assert is_cached(engine, TEXTS[1])


# --- the transformer


async def test_a_transformer_caches_what_passes(engine, llm):
    splitter = RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=0)
    chunks = splitter.split_documents([Document(" ".join(TEXTS), metadata={"source": "a"})])
    transformer = PrecomputeKV(llm, PROMPT, id_key="source")
    assert transformer.transform_documents(chunks) == chunks
    assert await transformer.atransform_documents(chunks) == chunks
    head = llm.head_of(PROMPT)
    assert all(is_cached(engine, chunk.page_content, head) for chunk in chunks)
    engine.forget(["a"])
    assert not any(is_cached(engine, chunk.page_content, head) for chunk in chunks)
    assert PrecomputeKV(llm).transform_documents([Document(" \n")])


# --- retrieved for the first time


def ask(chain, question, handler):
    return chain.invoke({"input": question}, config={"callbacks": [handler]})


def test_what_is_retrieved_for_the_first_time_is_cached_behind_the_prompts_own_head(engine, llm, monkeypatch):
    calls = Recorder(engine, monkeypatch).calls
    inner = InMemoryVectorStore(LetterEmbeddings())
    inner.add_documents(documents())
    chain, _ = retrieval_chain(llm, inner.as_retriever())
    handler = BlendCallbackHandler(llm)
    ask(chain, QUESTION, handler)
    assert calls[-1].result.stats.hits == 0
    assert engine.wait_for_ingestion(10)
    ask(chain, "What is the mountain?", handler)
    stats = calls[-1].result.stats
    assert (stats.hits, stats.misses) == (5, 0)
    assert stats.prefix_tokens > 16
    engine.forget(["d0"])  # filed under the documents' ids
    assert not is_cached(engine, TEXTS[0], llm.head_of(PROMPT))


def test_write_through_and_prefetch_can_be_switched_off(engine, llm, monkeypatch):
    prefetched = []
    monkeypatch.setattr(engine, "prefetch", prefetched.append)
    inner = InMemoryVectorStore(LetterEmbeddings())
    inner.add_documents(documents())
    chain, _ = retrieval_chain(llm, inner.as_retriever(search_kwargs={"k": 1}))
    ask(chain, TEXTS[0], BlendCallbackHandler(llm, prefetch=False, write_through=False))
    assert not prefetched
    ask(chain, TEXTS[0], BlendCallbackHandler(llm, write_through=False))
    assert len(prefetched) == 1
    assert engine.wait_for_ingestion(10)
    assert engine.num_chunks == 0


def test_a_handler_can_be_installed_for_all_chains(engine, llm, monkeypatch):
    monkeypatch.setattr(tracer_context, "_configure_hooks", list(tracer_context._configure_hooks))
    monkeypatch.setattr(
        "langchain_core.callbacks.manager._configure_hooks", tracer_context._configure_hooks, raising=False
    )
    inner = InMemoryVectorStore(LetterEmbeddings())
    inner.add_documents(documents())
    chain, given = retrieval_chain(llm, inner.as_retriever())
    handler = BlendCallbackHandler(llm).install()
    assert handler.install() is handler
    chain.batch([given])  # in another thread
    assert engine.wait_for_ingestion(10)
    assert engine.num_chunks == 5
    handler.uninstall()
    engine.forget(["d0", "d1", "d2", "d3"])
    ChatBlend(engine=engine).contexts.deleted(["d0", "d1", "d2", "d3"])
    chain.invoke(given)
    assert engine.wait_for_ingestion(10)
    assert not is_cached(engine, TEXTS[0], llm.head_of(PROMPT))


def test_a_handler_loads_no_model(tmp_path):
    handler = BlendCallbackHandler(ChatBlend(model=str(tmp_path / "nowhere")))
    handler.on_retriever_end(documents())
    assert handler._llm.loaded_engine is None


def test_a_wrapped_store_caches_what_was_in_it_before(engine, llm):
    inner = InMemoryVectorStore(LetterEmbeddings())
    inner.add_documents(documents())
    chain, given = lcel_chain(llm, BlendVectorStore(inner, llm).as_retriever())
    chain.invoke(given)
    assert engine.wait_for_ingestion(10)
    assert is_cached(engine, TEXTS[0], llm.head_of(PROMPT))


def test_one_new_document_among_cached_ones_is_cached(engine, llm):
    engine.ingest(TEXTS[:3], head=llm.head_of(PROMPT), progress=False)
    inner = InMemoryVectorStore(LetterEmbeddings())
    inner.add_documents(documents())
    chain, given = lcel_chain(llm, BlendVectorStore(inner, llm).as_retriever())
    chain.invoke(given)
    assert engine.wait_for_ingestion(10)
    assert is_cached(engine, TEXTS[3], llm.head_of(PROMPT))


def test_a_deleted_document_is_not_cached_afterwards(engine, llm):
    store = blend_store(llm, None)
    found = store.similarity_search(TEXTS[0], k=4)
    store.delete(["d0"])
    prompt = PROMPT.invoke({"context": format_docs(found), "input": QUESTION})
    llm.invoke(prompt)
    assert engine.wait_for_ingestion(10)
    assert not is_cached(engine, TEXTS[0])
    assert not is_cached(engine, TEXTS[0], llm.head_of(PROMPT))


def test_a_changed_template_is_noticed_and_learned(engine, llm, caplog, monkeypatch):
    calls = Recorder(engine, monkeypatch).calls
    store = blend_store(llm, None)  # cached for any head
    store.delete(list(store.inner.store))
    llm.learn_head(PROMPT)
    store.add_documents(documents())
    changed = ChatPromptTemplate.from_messages(
        [("system", random_text(98, 40) + "\n\nContext:\n{context}"), ("human", "{input}")]
    )
    chain = create_retrieval_chain(store.as_retriever(), create_stuff_documents_chain(llm, changed))
    with caplog.at_level(logging.INFO):
        chain.invoke({"input": QUESTION})
    assert calls[-1].result.stats.misses == 4  # by design
    assert "cached behind another head" in caplog.text
    assert "the template, its tools or the system message" in caplog.text
    assert engine.wait_for_ingestion(10)
    chain.invoke({"input": QUESTION})
    assert (calls[-1].result.stats.hits, calls[-1].result.stats.misses) == (5, 0)


# --- heads that are learned from prompts


def test_a_head_is_learned_in_whole_lines():
    memory = HeadMemory()
    assert memory.learn("Rules\nContext:\n[a.txt] ") == "Rules\nContext:\n"
    assert memory.learn("Rules\nContext:\n[b.txt] ") == "Rules\nContext:\n"
    assert memory.learn("") is None


def test_titles_and_questions_in_front_are_left_out_from_the_second_prompt_on():
    memory = HeadMemory()
    rules = "Rules that are long enough\n"
    assert memory.learn(rules + "Title a\n") == rules + "Title a\n"
    assert memory.learn(rules + "Title b\n") == rules
    assert memory.learn(rules + "Title c\nand more\n") == rules


def test_prompts_with_nothing_in_common_get_no_head(caplog):
    memory = HeadMemory()
    heads = [memory.learn(f"Question {i}\n") for i in range(8)]
    assert [head is None for head in heads] == [False] * 4 + [True] * 4
    assert caplog.text.count("differs from prompt to prompt") == 1
    assert memory.learn("Question 0\n") == "Question 0\n"


def test_notes_on_documents_are_bounded(llm):
    contexts = llm.contexts
    contexts.retrieved(Document(f"text {i}") for i in itertools.islice(itertools.count(), 1000))
    assert len(contexts._notes) <= 256
