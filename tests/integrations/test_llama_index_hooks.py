# ruff: noqa: F811  (fixtures are imported)
"""The other ways into the store: a pipeline step, callbacks and events; and what is reported to the outside."""

import asyncio
import gc
import json
import logging
import pickle
import threading

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, PromptTemplate, Settings
from llama_index.core.callbacks import CallbackManager
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.rag_blend import BlendCallbackHandler, BlendLLM, BlendVectorStore, PrecomputeKV
from llama_index_instrumentation import get_dispatcher
from toy_llama_index import (
    TEXTS,
    LetterEmbedding,
    TextStore,
    are_cached,
    documents,
    faiss_store,
    llm_text,
    make_index,
    one_thread,  # noqa: F401
    qdrant_store,
    recorder,  # noqa: F401
    save_tiny_model,
)

from rag_blend import BlendEngine

NAMES = list(TEXTS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(model_dir):
    with BlendEngine.from_pretrained(model_dir, storage=None, prime="none") as engine:
        yield BlendLLM(engine=engine, max_new_tokens=4)


@pytest.fixture
def named_llm(model_dir, tmp_path):
    """One that can be pickled."""
    made = BlendLLM(model_dir, storage=tmp_path / "kv", prime="none", max_new_tokens=4)
    yield made
    made.close()


def cached(llm, names=NAMES, head=None):
    return are_cached(llm, [llm_text(name) for name in names], head)


def splitter():
    return SentenceSplitter(chunk_size=200, chunk_overlap=0)


# --- PrecomputeKV


def test_a_pipeline_step_caches_and_passes_nodes_on(llm):
    step = PrecomputeKV(llm)
    nodes = splitter().get_nodes_from_documents(documents())
    assert step(nodes) is nodes
    assert cached(llm) == [True] * 4
    llm.engine.forget(["bees"])
    assert cached(llm) == [True, False, True, True]


def test_the_step_runs_in_pipelines_and_in_an_index(llm):
    IngestionPipeline(transformations=[splitter(), PrecomputeKV(llm)]).run(documents=documents("bees"))
    asyncio.run(IngestionPipeline(transformations=[splitter(), PrecomputeKV(llm)]).arun(documents=documents("bread")))
    template = PromptTemplate("Facts:\n{context_str}\n{query_str}")
    step = PrecomputeKV(llm, text_qa_template=template)
    IngestionPipeline(transformations=[splitter(), step]).run(documents=documents("ships"))
    assert cached(llm) == [False, True, False, True]
    assert cached(llm, head=llm.head(template)) == [True, False, False, False]


def test_the_step_has_a_name_and_a_fingerprint_for_the_pipelines_cache(model_dir, named_llm, tmp_path):
    step = PrecomputeKV(named_llm)
    assert step.to_dict() == {"class_name": "PrecomputeKV", "fingerprint": step.fingerprint}
    assert not named_llm.handle.is_loaded
    same = PrecomputeKV(BlendLLM(model_dir, storage=tmp_path / "kv", prime="none"))
    others = [
        PrecomputeKV(BlendLLM(model_dir, storage=tmp_path / "elsewhere", prime="none")),
        PrecomputeKV(BlendLLM(model_dir, storage=tmp_path / "kv", prime="none", namespace="other")),
        PrecomputeKV(named_llm, head="Facts:"),
        PrecomputeKV(BlendLLM(model_dir, storage=tmp_path / "kv", prime="none", system_prompt="Be kind.")),
    ]
    assert same.fingerprint == step.fingerprint
    assert len({other.fingerprint for other in [step, *others]}) == 5


def test_the_pipelines_cache_skips_nodes_only_for_the_same_store(model_dir, named_llm, tmp_path):
    pipeline = IngestionPipeline(transformations=[splitter(), PrecomputeKV(named_llm)])
    pipeline.run(documents=documents("bees"))
    other = BlendLLM(model_dir, storage=tmp_path / "other", prime="none")
    pipeline.transformations[-1] = PrecomputeKV(other)
    pipeline.run(documents=documents("bees"))
    assert cached(named_llm, ["bees"]) == cached(other, ["bees"]) == [True]
    other.close()


def test_a_pickled_step_holds_no_engine(named_llm, llm):
    step = PrecomputeKV(named_llm, head="<s>Facts:\n")
    assert named_llm.complete("p").text
    data = pickle.dumps(step)
    assert len(data) < 5000
    copy = pickle.loads(data)
    assert copy.fingerprint == step.fingerprint
    assert copy._head == step._head
    assert not copy._llm.handle.is_loaded
    with pytest.raises(TypeError, match="built from an engine object"):
        pickle.dumps(PrecomputeKV(llm))


def test_workers_fill_the_same_store(named_llm):
    """`arun` forks this process, in which OpenMP has computed already; `run` starts new ones, which is slow to test."""
    named_llm.complete("p")
    pipeline = IngestionPipeline(transformations=[splitter(), PrecomputeKV(named_llm)])
    nodes = asyncio.run(pipeline.arun(documents=documents("bees", "bread"), num_workers=2))
    assert len(nodes) == 2
    named_llm.engine.refresh()
    assert cached(named_llm) == [False, True, False, True]


def test_a_failing_cache_fails_no_pipeline(llm, monkeypatch, caplog):
    monkeypatch.setattr(llm.engine, "ingest", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with caplog.at_level(logging.WARNING):
        nodes = IngestionPipeline(transformations=[splitter(), PrecomputeKV(llm)]).run(documents=documents("bees"))
    assert len(nodes) == 1
    assert "disk full" in caplog.text


def test_an_awaited_step_leaves_the_event_loop_free(llm):
    nodes = splitter().get_nodes_from_documents(documents())
    threads = []
    ingest = llm.engine.ingest
    llm.engine.ingest = lambda *a, **k: (threads.append(threading.current_thread()), ingest(*a, **k))[1]
    asyncio.run(PrecomputeKV(llm).acall(nodes))
    assert threads[0] is not threading.main_thread()


def test_a_pipeline_that_upserts_erases_what_has_changed(llm):
    store = BlendVectorStore(SimpleVectorStore(), llm)
    pipeline = IngestionPipeline(
        transformations=[splitter(), PrecomputeKV(llm), LetterEmbedding()],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=documents())
    changed = Document(text="Bees keep bankers' hours now, it is said in the south.", id_="bees")
    pipeline.run(documents=[*documents("ships", "bread"), changed])
    assert cached(llm) == [True, False, False, True]
    assert are_cached(llm, [changed.text]) == [True]


# --- BlendCallbackHandler


@pytest.fixture
def handler(llm):
    made = BlendCallbackHandler(llm)
    get_dispatcher().add_event_handler(made)
    yield made
    get_dispatcher().event_handlers.remove(made)


def test_parsed_nodes_are_cached(llm):
    manager = CallbackManager([BlendCallbackHandler(llm)])
    parser = SentenceSplitter(chunk_size=200, chunk_overlap=0, callback_manager=manager)
    parser.get_nodes_from_documents(documents("bees"))

    async def in_a_loop():
        parser.get_nodes_from_documents(documents("bread"))
        before = cached(llm, ["bread"])
        assert await asyncio.to_thread(llm.engine.wait_for_ingestion, 10)
        return before

    assert asyncio.run(in_a_loop()) == [False]
    assert cached(llm) == [False, True, False, True]
    quiet = CallbackManager([BlendCallbackHandler(llm, precompute=False)])
    SentenceSplitter(callback_manager=quiet).get_nodes_from_documents(documents("ships"))
    assert cached(llm, ["ships"]) == [False]


def test_settings_take_the_handler(llm, monkeypatch):
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager([BlendCallbackHandler(llm)]))
    monkeypatch.setattr(Settings, "_node_parser", splitter())
    Settings.node_parser.get_nodes_from_documents(documents("clocks"))
    assert cached(llm) == [False, False, True, False]


@pytest.mark.parametrize("way", ["dispatcher", "callbacks"])
def test_retrieved_texts_are_fetched_and_cached_after_the_answer(llm, way, recorder, monkeypatch):
    fetched = []
    monkeypatch.setattr(llm.engine, "prefetch", fetched.append)
    index = make_index(documents())
    made = BlendCallbackHandler(llm)
    if way == "callbacks":
        index._callback_manager = CallbackManager([made])
    else:
        get_dispatcher().add_event_handler(made)
    try:
        engine = index.as_query_engine(llm=llm, similarity_top_k=2)
        hits = engine.query("Which bees keep the brood warm?").source_nodes
        names = [hit.node.ref_doc_id for hit in hits]
        assert fetched == [[llm_text(name) for name in names]]
        assert recorder.events[-1].mode == "full"
        assert llm.engine.wait_for_ingestion(10)
        assert cached(llm, names) == [True, True]
        engine.query("Which bees keep the other brood warm?")
        assert recorder.events[-1].hits >= 2
        llm.engine.forget([names[0]])
        assert cached(llm, names) == [False, True]  # filed under its document
    finally:
        if way == "dispatcher":
            get_dispatcher().event_handlers.remove(made)


def test_the_head_is_learned_from_the_prompts_when_it_comes_again(llm, handler, recorder):
    template = PromptTemplate("Some facts, to be used with care:\n{context_str}\nQ: {query_str}")
    engine = make_index(documents()).as_query_engine(llm=llm, text_qa_template=template)
    head = llm.head(template)
    names = [hit.node.ref_doc_id for hit in engine.query("bees?").source_nodes]
    assert llm.engine.wait_for_ingestion(10)
    assert cached(llm, names, head) == [False, False]
    engine.query("And which bees?")
    assert llm.engine.wait_for_ingestion(10)
    assert cached(llm, names, head) == [True, True]
    engine.query("And which other bees?")
    assert recorder.events[-1].hits >= 2


def test_a_refine_step_is_not_cached_for(llm, handler):
    """Its head holds the question and the answer so far."""
    engine = make_index(documents()).as_query_engine(llm=llm, response_mode="refine", similarity_top_k=2)
    offered = []
    later = llm.engine.ingest_later
    llm.engine.ingest_later = lambda texts, head, doc_ids: (offered.append(head), later(texts, head, doc_ids))[1]
    engine.query("bees?")
    assert offered == [tuple(llm.head())]
    assert llm.engine.wait_for_ingestion(10)


def test_streams_and_awaited_answers_are_learned_from_as_well(llm, handler):
    index = make_index(documents())
    response = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=1).query("bees?")
    name = response.source_nodes[0].node.ref_doc_id
    assert cached(llm, [name]) == [False]
    str(response)
    assert llm.engine.wait_for_ingestion(10)
    assert cached(llm, [name]) == [True]
    response = asyncio.run(index.as_query_engine(llm=llm, similarity_top_k=4).aquery("bread?"))
    assert llm.engine.wait_for_ingestion(10)
    assert cached(llm) == [True] * 4


def test_write_through_can_be_switched_off(llm, monkeypatch):
    made = BlendCallbackHandler(llm, write_through=False, prefetch=False)
    monkeypatch.setattr(llm.engine, "prefetch", lambda texts: 1 / 0)
    monkeypatch.setattr(llm.engine, "ingest_later", lambda *a, **k: 1 / 0)
    index = make_index(documents())
    index._callback_manager = CallbackManager([made])
    index.as_query_engine(llm=llm).query("bees?")
    assert not list(llm.handle.listeners)


def test_a_handler_that_is_gone_learns_nothing(llm):
    made = BlendCallbackHandler(llm)
    assert len(llm.handle.listeners) == 1
    del made
    gc.collect()
    assert not list(llm.handle.listeners)


def test_hints_load_no_model_and_trouble_stays_inside(named_llm, llm, monkeypatch, caplog):
    BlendCallbackHandler(named_llm).on_event_end("retrieve", {"nodes": []})
    index = make_index(documents("bees"))
    index._callback_manager = CallbackManager([BlendCallbackHandler(named_llm)])
    index.as_retriever().retrieve("bees?")
    assert not named_llm.handle.is_loaded

    monkeypatch.setattr(llm.engine, "prefetch", lambda texts: 1 / 0)
    monkeypatch.setattr(llm.engine, "ingest_later", lambda *a, **k: 1 / 0)
    index._callback_manager = CallbackManager([BlendCallbackHandler(llm)])
    with caplog.at_level(logging.WARNING):
        assert index.as_query_engine(llm=llm).query("bees?").source_nodes
    assert caplog.text.count("ZeroDivisionError") == 2


def test_few_texts_are_remembered(llm):
    made = BlendCallbackHandler(llm, prefetch=False)
    made._write_through.retrieved([TextNode(text=f"text number {i}") for i in range(1000)])
    assert len(made._write_through._retrieved) == 256


# --- events


class Spans(SimpleSpanHandler):
    """Remembers which span was which method."""

    methods: dict = {}  # noqa: RUF012  (pydantic copies it)

    def new_span(self, id_, bound_args, instance=None, parent_span_id=None, tags=None, **kwargs):
        self.methods[id_] = id_.split("-")[0]
        return super().new_span(id_, bound_args, instance, parent_span_id, tags, **kwargs)


@pytest.fixture
def spans():
    made = Spans()
    get_dispatcher().add_span_handler(made)
    yield made
    get_dispatcher().span_handlers.remove(made)


def call(llm, endpoint):
    prompt = "What do bees do?"
    asked = [ChatMessage(content=prompt)] if "chat" in endpoint else prompt
    if not endpoint.startswith("a"):
        result = getattr(llm, endpoint)(asked)
        return [*result] if "stream" in endpoint else [result]

    async def run():
        result = await getattr(llm, endpoint)(asked)
        return [chunk async for chunk in result] if "stream" in endpoint else [result]

    return asyncio.run(run())


ENDPOINTS = [way + kind for kind in ("complete", "chat") for way in ("", "a", "stream_", "astream_")]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_call_is_one_event_in_its_own_span(llm, recorder, spans, endpoint):
    last = call(llm, endpoint)[-1]
    (event,) = recorder.events
    assert spans.methods[event.span_id] == f"BlendLLM.{endpoint}"
    data = event.model_dump()
    json.dumps(data, default=str)
    assert data["class_name"] == "BlendEvent"
    figures = last.raw["rag_blend"]
    assert {name: data[name] for name in figures} == figures
    assert event.prompt_tokens == last.raw["usage"]["prompt_tokens"] == event.fresh_tokens
    assert event.completion_tokens == last.raw["usage"]["completion_tokens"] == 4
    assert event.ttft_s > 0
    assert event.model_name == llm.metadata.model_name
    assert event.note == "no cached chunk and no earlier prompt was found in the prompt"


def test_a_stream_that_is_left_is_no_event(llm, recorder):
    stream = llm.stream_complete("p", max_tokens=3000)
    next(stream)
    stream.close()
    assert not recorder.events


def test_the_event_tells_what_was_reused_and_why_not_more(llm, recorder):
    index = make_index(documents())
    llm.attach(index, show_progress=False)
    engine = index.as_query_engine(llm=llm, similarity_top_k=3)
    engine.query("bees?")
    event = recorder.events[-1]
    assert event.reused_tokens > 100
    assert f"{event.fresh_tokens} tokens are neither in a cached chunk" in event.note
    assert f"{event.recomputed_tokens} tokens of cached chunks were recomputed" in event.note
    engine.query("bees?")
    assert recorder.events[-1].load_s >= 0


def test_a_model_that_cannot_blend_says_so(model_dir, recorder, monkeypatch):
    monkeypatch.setattr("rag_blend.engine.adapter_for", lambda model, windows: (_ for _ in ()).throw(unsupported()))
    with BlendEngine.from_pretrained(model_dir, storage=None, on_unsupported="full") as engine:
        BlendLLM(engine=engine, max_new_tokens=2).complete("p")
    assert "full prefill" in recorder.events[-1].note


def unsupported():
    from rag_blend import UnsupportedModelError

    return UnsupportedModelError("tiny", "it has no attention")


# --- vector stores that differ


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_a_database_is_followed_through_insert_refresh_and_delete(llm, use_async):
    index = make_index(documents("ships", "bees"), qdrant_store(use_async), use_async=use_async)
    llm.attach(index, show_progress=False)
    changed = Document(text="Bees keep bankers' hours now, it is said in the south.", id_="bees")
    if use_async:

        async def change():
            await index.ainsert(documents("bread")[0])
            await index.aupdate_ref_doc(changed)
            await index.adelete_ref_doc("ships")

        asyncio.run(change())
    else:
        index.insert(documents("bread")[0])
        index.update_ref_doc(changed)
        index.delete_ref_doc("ships")
    assert cached(llm) == [False, False, False, True]
    assert are_cached(llm, [changed.text]) == [True]


def test_a_store_that_cannot_delete_erases_nothing(llm):
    index = make_index(documents(), faiss_store())
    llm.attach(index, show_progress=False)
    with pytest.raises(NotImplementedError):
        index.delete_ref_doc("bees")
    assert cached(llm) == [True] * 4


def test_a_changed_metadata_template_is_another_chunk_but_its_text_is_found(llm, recorder):
    index = make_index(documents("bees"), TextStore())
    llm.attach(index, show_progress=False)
    for node in index.vector_store.rows.values():
        node.metadata_template = "{key} = {value}"
    index.as_query_engine(llm=llm).query("Which bees?")
    event = recorder.events[-1]
    assert event.reused_tokens + event.recomputed_tokens > len(TEXTS["bees"]) - 5
    assert llm.attach(index, show_progress=False).chunks == 1
    index.as_query_engine(llm=llm).query("Which other bees?")
    assert recorder.events[-1].prefix_tokens > event.prefix_tokens + len(TEXTS["bees"])


def test_no_thread_is_left(model_dir, tmp_path):
    before = set(threading.enumerate())
    llm = BlendLLM(model_dir, storage=tmp_path / "kv", max_new_tokens=4, prime="none")
    index = make_index(documents())
    index._callback_manager = CallbackManager([BlendCallbackHandler(llm)])
    for endpoint in ENDPOINTS:
        call(llm, endpoint)
    index.as_query_engine(llm=llm).query("bees?")
    assert llm.engine.wait_for_ingestion(10)
    llm.close()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if "rag-blend" in name or "Thread" in name]
