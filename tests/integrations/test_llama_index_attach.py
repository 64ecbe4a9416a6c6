"""BlendLLM on a real engine (tiny random models) under LlamaIndex's own indexes and query engines."""

import asyncio
import logging
import pickle
import threading

import pytest

pytest.importorskip("llama_index.core")

import torch
from llama_index.core import (
    Document,
    PromptTemplate,
    StorageContext,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.base.response.schema import Response, StreamingResponse
from llama_index.core.indices.list import SummaryIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.llms.rag_blend import BlendLLM, BlendVectorStore
from toy_llama_index import (
    BOS,
    CHAT_TEMPLATE,
    TEXTS,
    LetterEmbedding,
    TextStore,
    are_cached,
    documents,
    faiss_map_store,
    llm_text,
    make_index,
    one_thread,  # noqa: F401
    save_tiny_model,
)
from transformers import AutoModelForCausalLM

from rag_blend import BlendEngine, ForgetReport, PromptTooLongError, RagBlendError


@pytest.fixture(scope="session", params=["chat", "text"])
def model_dir(request, tmp_path_factory):
    """A tiny Llama with and without a chat template."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), chat=request.param == "chat")


@pytest.fixture
def engine(model_dir, tmp_path):
    with BlendEngine.from_pretrained(str(model_dir), storage=str(tmp_path / "kv"), prime="none") as engine:
        yield engine


@pytest.fixture
def llm(engine):
    return BlendLLM(engine=engine, max_new_tokens=8)


STORES = {"simple": SimpleVectorStore, "faiss": faiss_map_store, "text": TextStore}


@pytest.fixture(params=STORES)
def store(request):
    return STORES[request.param]()


def recorded(llm, monkeypatch):
    """Record what reaches the engine."""
    calls = []
    generate = llm.engine.generate

    def record(prompt, **kwargs):
        generation = generate(prompt, **kwargs)
        calls.append((prompt, kwargs["add_special_tokens"], generation))
        return generation

    monkeypatch.setattr(llm.engine, "generate", record)
    return calls


def prompt_ids(llm, prompt, special):
    if special is None:
        special = not prompt.startswith("<s>")
    return llm.engine.tokenizer(prompt, add_special_tokens=special)["input_ids"]


# --- the endpoints


def test_all_endpoints_give_the_same_greedy_answer(llm):
    messages = [ChatMessage(role="user", content="What do bees do?")]

    async def run():
        return (
            (await llm.achat(messages)).message.content,
            [chunk async for chunk in await llm.astream_chat(messages)][-1].message.content,
            (await llm.acomplete("What do bees do?")).text,
            [chunk async for chunk in await llm.astream_complete("What do bees do?")][-1].text,
        )

    achat, astream_chat, acomplete, astream_complete = asyncio.run(run())
    assert llm.chat(messages).message.content == achat == astream_chat
    assert [*llm.stream_chat(messages)][-1].message.content == achat
    assert llm.complete("What do bees do?").text == acomplete == astream_complete
    assert [*llm.stream_complete("What do bees do?")][-1].text == acomplete


def test_the_answer_is_that_of_stock_generate(llm, model_dir):
    response = llm.complete("What do bees do?")
    stock = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    prompt = "<s><user>What do bees do?\n<assistant>" if llm.metadata.is_chat_model else "<s>What do bees do?"
    ids = torch.tensor([llm.engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    new = stock.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert response.text == llm.engine.tokenizer.decode(new, skip_special_tokens=True)
    assert response.raw["usage"]["prompt_tokens"] == ids.shape[1]
    assert response.raw["usage"]["completion_tokens"] == len(new)
    assert response.raw["usage"]["total_tokens"] == ids.shape[1] + len(new)


def test_stop_strings_cut_the_answer(llm):
    whole = llm.complete("What do bees do?", max_tokens=30).text
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    assert llm.complete("What do bees do?", max_tokens=30, stop=stop).text == cut
    assert "".join(c.delta for c in llm.stream_complete("What do bees do?", max_tokens=30, stop=[stop])) == cut


def test_sampling_arguments_reach_the_model(llm):
    assert llm.complete("p", max_tokens=3).raw["usage"]["completion_tokens"] <= 3
    greedy = {llm.complete("p", temperature=0).text for _ in range(2)}
    hot = {llm.complete("p", temperature=50.0, max_tokens=8).text for _ in range(4)}
    assert len(greedy) == 1
    assert len(hot) > 1


def test_metadata_is_that_of_the_engine_before_and_after_loading(model_dir, tmp_path, llm):
    lazy = BlendLLM(model=model_dir, storage=tmp_path / "kv2", max_new_tokens=8)
    assert lazy._handle._engine is None
    before = lazy.metadata
    assert lazy._handle._engine is None
    assert (before.context_window, before.is_chat_model) == (
        llm.metadata.context_window,
        llm.metadata.is_chat_model,
    )
    assert lazy.complete("p").text == llm.complete("p").text
    assert lazy.metadata == before
    again = pickle.loads(pickle.dumps(lazy))
    assert again._handle._engine is None
    assert again.complete("p").text == llm.complete("p").text
    lazy.close()
    again.close()


def test_concurrent_calls_do_not_disturb_each_other(llm):
    prompts = [f"Question number {i}?" for i in range(6)]
    alone = [llm.complete(prompt).text for prompt in prompts]

    async def run():
        return await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))

    assert [response.text for response in asyncio.run(run())] == alone


def alive_streams():
    return [thread for thread in threading.enumerate() if thread.name == "rag-blend-stream"]


def test_leaving_a_stream_ends_its_thread(llm):
    # Only line breaks, so that text comes with every token.
    line_break = llm.engine.tokenizer.convert_tokens_to_ids("\u010a")
    others = [token for token in range(262) if token != line_break]
    long = {"max_tokens": 3000, "min_new_tokens": 2000, "suppress_tokens": others}
    stream = llm.stream_complete("p", **long)
    next(stream)
    assert alive_streams()
    stream.close()
    assert not alive_streams()

    async def run():
        async for _ in await llm.astream_complete("p", **long):
            break
        for _ in range(100):
            if not alive_streams():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the computation goes on")

    asyncio.run(run())


# --- head


def test_the_head_is_the_start_of_the_prompts_that_a_query_engine_sends(llm, store, monkeypatch):
    index = make_index(documents(), store)
    calls = recorded(llm, monkeypatch)
    for question in ("Why?", " ", "{context_str} (what)"):
        index.as_query_engine(llm=llm).query(question)
    head = llm.head()
    assert len(head) > 30
    for prompt, special, _ in calls:
        ids = prompt_ids(llm, prompt, special)
        assert ids[: len(head)] == head
        assert ids.count(0) == 1
        # Nothing of the fixed text is left out, bar a token that the context may change.
        behind = llm.engine.tokenizer.decode(ids[len(head) :])
        assert behind.lstrip("\n").startswith("topic: ")


def test_the_head_follows_template_and_system_prompt(engine):
    llm = BlendLLM(engine=engine, system_prompt="Be kind.")
    template = PromptTemplate("Facts: {context_str}\nQ: {query_str}")
    text = engine.tokenizer.decode(llm.head(template))
    assert "Be kind." in text
    assert text.rstrip().endswith("Facts:")
    with pytest.raises(ValueError, match="context_str"):
        llm.head(PromptTemplate("Q: {query_str}"))


def test_head_as_text_or_ids(llm, engine, monkeypatch):
    index = make_index(documents("bees"))
    heads = []
    ingest = engine.ingest
    monkeypatch.setattr(engine, "ingest", lambda *a, **k: (heads.append(k["head"]), ingest(*a, **k))[1])
    llm.attach(index, head="<s>Facts:\n", show_progress=False)
    llm.attach(index, head=[0, 5, 6], show_progress=False)
    assert heads[0][0] == 0
    assert heads[0].count(0) == 1
    assert heads[1] == [0, 5, 6]


def test_a_date_in_the_head_is_pointed_out(llm, caplog):
    if not llm.metadata.is_chat_model:
        pytest.skip("only chat templates write dates")
    index = make_index(documents("bees"))
    with caplog.at_level(logging.WARNING):
        llm.attach(index, show_progress=False)
        assert "date" not in caplog.text
        today = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
        llm.engine.tokenizer.chat_template = today + BOS + CHAT_TEMPLATE
        llm.attach(index, show_progress=False)
    assert "not reused tomorrow" in caplog.text
    caplog.clear()
    pinned = BlendLLM(engine=llm.engine, chat_template_kwargs={"date_string": "26 Jul 2024"})
    pinned.attach(index, show_progress=False)
    assert "date" not in caplog.text


# --- attach


def test_what_is_in_the_index_is_cached_and_reused(llm, store, monkeypatch):
    index = make_index(documents(), store)
    report = llm.attach(index, show_progress=False)
    assert report.chunks >= 4
    calls = recorded(llm, monkeypatch)
    response = index.as_query_engine(llm=llm, similarity_top_k=3).query("Which bees keep the brood warm?")
    assert type(response) is Response
    assert len(response.source_nodes) == 3
    generation = calls[-1][2]
    assert str(response) == generation.text
    assert generation.stats.reused_tokens > 100
    assert generation.stats.mode == "blend"


def test_reuse_shows_in_the_usage_of_a_response(llm):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    seen = []
    original = BlendLLM._complete

    def spy(self, prompt, kwargs, cancel=None):
        response = original(self, prompt, kwargs, cancel)
        seen.append(response.raw)
        return response

    BlendLLM._complete = spy
    try:
        index.as_query_engine(llm=llm).query("bees?")
    finally:
        BlendLLM._complete = original
    usage, figures = seen[0]["usage"], seen[0]["rag_blend"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == figures["prefix_tokens"] + figures["reused_tokens"] > 100
    assert usage["prompt_tokens"] == sum(
        figures[f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "fresh")
    )


def test_full_recompute_answers_as_stock_generate(model_dir, tmp_path, monkeypatch):
    with BlendEngine.from_pretrained(str(model_dir), storage=str(tmp_path / "kv"), recompute_ratio=1.0) as engine:
        llm = BlendLLM(engine=engine, max_new_tokens=12)
        index = make_index(documents())
        llm.attach(index, show_progress=False)
        calls = recorded(llm, monkeypatch)
        answer = str(index.as_query_engine(llm=llm, similarity_top_k=3).query("Which bees?"))
        prompt, special, generation = calls[0]
        assert generation.stats.recomputed_tokens > 100
        ids = torch.tensor([prompt_ids(llm, prompt, special)])
        stock = AutoModelForCausalLM.from_pretrained(model_dir).eval()
        new = stock.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert answer == engine.tokenizer.decode(new, skip_special_tokens=True)


def test_attaching_twice_wraps_once_and_computes_nothing(llm, store):
    index = make_index(documents(), store)
    llm.attach(index, show_progress=False)
    wrapper = index.vector_store
    report = llm.attach(index, show_progress=False)
    assert report.chunks == 0
    assert index.vector_store is wrapper
    assert wrapper.inner is store


def test_two_llms_can_follow_one_index(engine, tmp_path, model_dir):
    index = make_index(documents("bees"))
    with BlendEngine.from_pretrained(str(model_dir), storage=str(tmp_path / "kv2"), prime="none") as second:
        llms = [BlendLLM(engine=engine), BlendLLM(engine=second)]
        for _ in range(2):
            for llm in llms:
                llm.attach(index, show_progress=False)
        assert isinstance(index.vector_store.inner, BlendVectorStore)
        assert isinstance(index.vector_store.inner.inner, SimpleVectorStore)
        index.insert(documents("bread")[0])
        assert [are_cached(llm, [llm_text("bread")]) for llm in llms] == [[True], [True]]
        index.delete_ref_doc("bread", delete_from_docstore=True)
        assert [are_cached(llm, [llm_text("bread")]) for llm in llms] == [[False], [False]]


def test_other_indexes_are_refused_by_name(llm):
    index = SummaryIndex.from_documents(documents("bees"))
    with pytest.raises(TypeError, match="SummaryIndex"):
        llm.attach(index)


def test_insertions_are_cached(llm, store):
    index = make_index(documents("ships"), store)
    llm.attach(index, show_progress=False)
    index.insert(documents("bees")[0])
    index.insert_nodes([TextNode(text=TEXTS["bread"], metadata={"topic": "bread"})])
    asyncio.run(index.ainsert(documents("clocks")[0]))
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True] * 4


def test_an_ingestion_pipeline_on_the_wrapped_store_is_followed(llm):
    index = make_index(documents("ships"), TextStore())
    llm.attach(index, show_progress=False)
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=200), LetterEmbedding()], vector_store=index.vector_store
    )
    pipeline.run(documents=documents("bees"))
    assert are_cached(llm, [llm_text("bees")]) == [True]


def test_a_store_can_be_wrapped_before_the_index_is_built(llm, store):
    index = make_index(documents(), BlendVectorStore(store, llm))
    assert are_cached(llm, [llm_text("bees")]) == [True]
    wrapper = index.vector_store
    assert llm.attach(index, show_progress=False).chunks == 0
    assert index.vector_store is wrapper


def test_refreshed_documents_are_cached_anew_and_their_old_text_is_erased(llm, store):
    index = make_index(documents(), store)
    llm.attach(index, show_progress=False)
    new_text = "Bees now keep bankers' hours and take a long holiday in the south every winter season."
    changed = Document(text=new_text, id_="bees", metadata={"topic": "bees"})
    assert index.refresh_ref_docs([*documents("ships", "clocks", "bread"), changed]) == [False] * 3 + [True]
    assert are_cached(llm, [llm_text("bees", new_text), llm_text("ships")]) == [True, True]
    assert are_cached(llm, [llm_text("bees")]) == [False]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_deleted_documents_are_erased(llm, store, mode):
    index = make_index(documents(), store)
    llm.attach(index, show_progress=False)
    if mode == "sync":
        index.delete_ref_doc("bees", delete_from_docstore=True)
    else:
        asyncio.run(index.adelete_ref_doc("bees", delete_from_docstore=True))
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_deleted_nodes_are_erased_and_their_neighbours_kept(llm, store, mode, monkeypatch):
    text = "\n\n".join([TEXTS["ships"], TEXTS["bees"], TEXTS["bread"]])
    index = VectorStoreIndex(
        nodes=[],
        embed_model=LetterEmbedding(),
        storage_context=StorageContext.from_defaults(vector_store=store),
    )
    splitter = SentenceSplitter(chunk_size=25, chunk_overlap=0, paragraph_separator="\n\n")
    nodes = splitter.get_nodes_from_documents([Document(text=text, id_="mixed"), *documents("clocks")])
    assert len(nodes) == 4
    index.insert_nodes(nodes)
    llm.attach(index, show_progress=False)
    computed = []
    ingest = llm.engine.ingest
    monkeypatch.setattr(llm.engine, "ingest", lambda *a, **k: (computed.append(r := ingest(*a, **k)), r)[1])
    if mode == "sync":
        index.delete_nodes([nodes[1].node_id])
    else:
        asyncio.run(index.adelete_nodes([nodes[1].node_id]))
    assert sum(report.chunks for report in computed) == 0
    texts = [node.get_content(MetadataMode.LLM).strip() for node in nodes]
    assert are_cached(llm, texts) == [True, False, True, True]
    # The neighbours are still filed under their document.
    index.delete_ref_doc("mixed")
    assert are_cached(llm, texts) == [False, False, False, True]


def test_nodes_deleted_by_their_metadata_are_erased(llm):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    index.vector_store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="topic", value="bees")]))
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_clearing_the_store_erases_all(llm, mode):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    index.vector_store.clear() if mode == "sync" else asyncio.run(index.vector_store.aclear())
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [False] * 4


def test_a_node_id_given_to_a_store_that_takes_node_ids_erases_that_node(llm):
    index = make_index(documents(), faiss_map_store())
    llm.attach(index, show_progress=False)
    bees = next(i for i, node in index.docstore.docs.items() if node.ref_doc_id == "bees")
    index.vector_store.delete(bees)
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


def test_the_rest_is_cached_again_when_the_priming_text_was_deleted(llm, store, monkeypatch):
    index = make_index(documents(), store)
    llm.attach(index, show_progress=False)
    forget = llm.engine.forget

    def forget_all(doc_ids):
        forget([*doc_ids, *TEXTS])
        return ForgetReport(entries=9, prime_renewed=True)

    monkeypatch.setattr(llm.engine, "forget", forget_all)
    index.delete_ref_doc("bees", delete_from_docstore=True)
    monkeypatch.undo()
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


def test_deleting_a_document_that_the_engine_primed_with_renews_the_rest(model_dir, tmp_path, caplog):
    storage = str(tmp_path / "kv")
    with BlendEngine.from_pretrained(str(model_dir), storage=storage, prime_tokens=24) as engine:
        llm = BlendLLM(engine=engine)
        index = make_index(documents())
        llm.attach(index, show_progress=False)
        with caplog.at_level(logging.WARNING):
            index.delete_ref_doc("bees", delete_from_docstore=True)
        assert "being cached again" in caplog.text
        assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


def test_an_index_loaded_from_disk_is_followed_after_attaching_again(llm, tmp_path):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    index.storage_context.persist(tmp_path / "index")
    storage = StorageContext.from_defaults(persist_dir=str(tmp_path / "index"))
    loaded = load_index_from_storage(storage, embed_model=LetterEmbedding())
    assert llm.attach(loaded, show_progress=False).chunks == 0
    loaded.delete_ref_doc("bees", delete_from_docstore=True)
    assert are_cached(llm, [llm_text(name) for name in TEXTS]) == [True, False, True, True]


# --- failures


def test_nothing_is_cached_for_nodes_that_the_store_refused(llm, store, monkeypatch):
    index = make_index(documents("ships"), store)
    llm.attach(index, show_progress=False)

    def refuse(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(type(store), "add", refuse)
    with pytest.raises(OSError, match="disk full"):
        index.insert(documents("bees")[0])
    assert are_cached(llm, [llm_text("bees")]) == [False]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failing_cache_does_not_fail_the_indexing(llm, store, monkeypatch, caplog, mode):
    index = make_index(documents("ships"), store)
    llm.attach(index, show_progress=False)

    def fail(*args, **kwargs):
        raise OSError("no space left for caches")

    monkeypatch.setattr(llm.engine, "ingest", fail)
    with caplog.at_level(logging.WARNING):
        if mode == "sync":
            index.insert(documents("bees")[0])
        else:
            asyncio.run(index.ainsert(documents("bees")[0]))
    assert "no space left for caches" in caplog.text
    monkeypatch.undo()
    response = index.as_query_engine(llm=llm, similarity_top_k=2).query("bees?")
    assert {node.node.ref_doc_id for node in response.source_nodes} == {"ships", "bees"}
    assert llm.attach(index, show_progress=False).chunks == 1


def test_a_failing_erasure_is_raised(llm, monkeypatch):
    index = make_index(documents())
    llm.attach(index, show_progress=False)

    def fail(doc_ids):
        raise OSError("cache server unreachable")

    monkeypatch.setattr(llm.engine, "forget", fail)
    with pytest.raises(OSError, match="unreachable"):
        index.delete_ref_doc("bees", delete_from_docstore=True)
    monkeypatch.undo()
    index.delete_ref_doc("bees", delete_from_docstore=True)
    assert are_cached(llm, [llm_text("bees")]) == [False]


def test_a_failing_attach_leaves_the_index_as_it_was(llm, monkeypatch):
    index = make_index(documents())
    store = index.vector_store
    monkeypatch.setattr(llm.engine, "ingest", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.attach(index, show_progress=False)
    assert index.vector_store is store


def test_a_store_that_cannot_list_its_nodes_is_followed_from_now_on(llm, monkeypatch, caplog):
    index = make_index(documents("ships"), TextStore())
    monkeypatch.setattr(TextStore, "get_nodes", BasePydanticVectorStore.get_nodes)
    with caplog.at_level(logging.WARNING):
        assert llm.attach(index, show_progress=False).chunks <= 1  # the head itself
    assert "cannot list its nodes" in caplog.text
    index.insert(documents("bees")[0])
    assert are_cached(llm, [llm_text("bees")]) == [True]


# --- the wrapper is a good stand-in


def test_everything_else_falls_through_to_the_inner_store(llm):
    inner = TextStore(flavour="peach")
    wrapper = BlendVectorStore(inner, llm)
    assert isinstance(wrapper, BasePydanticVectorStore)
    assert (wrapper.stores_text, wrapper.is_embedding_query) == (True, True)
    assert (wrapper.client, wrapper.flavour, wrapper.rows) == ("the client", "peach", {})
    with pytest.raises(AttributeError, match="colour"):
        _ = wrapper.colour
    assert BlendVectorStore(SimpleVectorStore(), llm)._data is not None


def test_retrievers_and_engines_made_before_attach_keep_working(llm, store, monkeypatch):
    index = make_index(documents(), store)
    query_engine = index.as_query_engine(llm=llm)
    llm.attach(index, show_progress=False)
    calls = recorded(llm, monkeypatch)
    assert len(query_engine.query("Which bees keep the brood warm?").source_nodes) == 2
    assert calls[-1][2].stats.reused_tokens > 50


def test_the_wrapped_index_persists(llm, tmp_path):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    index.vector_store.persist(str(tmp_path / "vectors.json"))
    assert len(SimpleVectorStore.from_persist_path(str(tmp_path / "vectors.json")).data.embedding_dict) == 4


# --- query engines


def test_streaming_and_async_query_engines(llm):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    plain = str(index.as_query_engine(llm=llm).query("bees?"))
    streaming = index.as_query_engine(llm=llm, streaming=True).query("bees?")
    assert isinstance(streaming, StreamingResponse)
    assert "".join(streaming.response_gen) == plain
    assert str(asyncio.run(index.as_query_engine(llm=llm).aquery("bees?"))) == plain


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_chat_engines_answer(llm, mode):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    chat = index.as_chat_engine(llm=llm, chat_mode=mode)
    assert chat.chat("bees?").source_nodes
    assert "".join(chat.stream_chat("And bread?").response_gen)
    assert len(chat.chat_history) == 4


def test_an_empty_question_is_answered(llm):
    # SimpleVectorStore and Faiss cannot search for an empty question: LlamaIndex makes no embedding of it.
    index = make_index(documents(), TextStore())
    llm.attach(index, show_progress=False)
    assert index.as_query_engine(llm=llm).query("").source_nodes


@pytest.mark.parametrize("trouble", ["too long", "bad option"])
def test_trouble_is_not_taken_for_an_empty_answer(llm, engine, trouble):
    """LlamaIndex's refine step swallows ValueError and TypeError and answers "Empty Response"."""
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    if trouble == "too long":
        engine.context_window = 50
        with pytest.raises(PromptTooLongError, match=r"context window of .* is 50 tokens"):
            index.as_query_engine(llm=llm).query("bees?")
    else:
        picky = BlendLLM(engine=engine, generate_kwargs={"num_return_sequences": 2})
        with pytest.raises(RagBlendError, match="one answer per call"):
            index.as_query_engine(llm=picky).query("bees?")


def test_an_empty_index_answers_as_ever_and_can_be_filled_later(llm, store):
    index = VectorStoreIndex(
        nodes=[],
        embed_model=LetterEmbedding(),
        storage_context=StorageContext.from_defaults(vector_store=store),
    )
    llm.attach(index, show_progress=False)
    assert str(index.as_query_engine(llm=llm).query("bees?")) == "Empty Response"
    index.insert(documents("bees")[0])
    assert index.as_query_engine(llm=llm).query("bees?").source_nodes
    assert are_cached(llm, [llm_text("bees")]) == [True]
