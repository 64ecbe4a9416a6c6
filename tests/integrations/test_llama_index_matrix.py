# ruff: noqa: F811  (fixtures are imported)
"""Every response mode, streaming or not, awaited or not, on every kind of vector store, against stock HuggingFaceLLM.

With ratio 1 everything that was found in the store is computed again among the stored rows: the answer must be that of
plain transformers on the same token ids. The tokenizer here adds no BOS, because HuggingFaceLLM would add a second one.
"""

import asyncio

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("llama_index.llms.huggingface")

from llama_index.core import Settings
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.rag_blend import BlendLLM
from toy_llama_index import (
    CHAT_TEMPLATE,
    byte_tokenizer,
    documents,
    faiss_map_store,
    faiss_store,
    make_index,
    one_thread,  # noqa: F401
    qdrant_store,
    recorder,  # noqa: F401
    tiny_model,
)

from rag_blend import BlendEngine

WINDOW, NEW_TOKENS = 3900, 4
QUESTION = "Which bees keep the brood warm?"
WAYS = ["query", "aquery"]
STORES = {
    "simple": lambda way: SimpleVectorStore(),
    "faiss": lambda way: faiss_store(),
    "faiss map": lambda way: faiss_map_store(),
    "qdrant": lambda way: qdrant_store(use_async=way == "aquery"),
}
NO_STREAM = {ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE}
NO_MODEL = {ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY}
NO_CHUNKS = {*NO_MODEL, ResponseMode.GENERATION}


@pytest.fixture(scope="module", params=[("chat", store) for store in STORES] + [("text", "simple")], ids="-".join)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def llms(case):
    """Ours and the stock one, on one model; ours reuses behind any head, so that all modes have something to reuse."""
    chat = case[0] == "chat"
    model, tokenizer = tiny_model(layers=2), byte_tokenizer(CHAT_TEMPLATE if chat else None, adds_bos=False)
    stock = HuggingFaceLLM(
        model=model, tokenizer=tokenizer, context_window=WINDOW, max_new_tokens=NEW_TOKENS, is_chat_model=chat
    )
    options = {"storage": None, "prime": "none", "any_head": True, "prefix_cache_bytes": 0}
    with BlendEngine(model, tokenizer, recompute_ratio=1.0, **options) as engine:
        yield BlendLLM(engine=engine, context_window=WINDOW, max_new_tokens=NEW_TOKENS), stock


@pytest.fixture(autouse=True)
def default_llm(llms, monkeypatch):
    """LlamaIndex wants a default LLM for the modes that use none, and would import OpenAI's."""
    monkeypatch.setattr(Settings, "_llm", llms[0])


@pytest.fixture(scope="module")
def indexes(case, llms):
    """One index per way of asking, since a client of Qdrant's sees nothing of the other's data."""
    made = {}
    for way in WAYS:
        made[way] = make_index(documents(), STORES[case[1]](way), use_async=way == "aquery")
        llms[0].attach(made[way], show_progress=False)
    return made


@pytest.fixture(scope="module")
def stock_answers(llms):
    """Stock answers by mode and retrieved texts; the same for all stores and ways."""
    answers = {}

    def stock_answer(index, way, mode):
        retriever = index.as_retriever(similarity_top_k=2)
        nodes = retriever.retrieve(QUESTION) if way == "query" else asyncio.run(retriever.aretrieve(QUESTION))
        key = mode, tuple(hit.node.get_content(MetadataMode.LLM) for hit in nodes)
        if key not in answers:
            answers[key] = str(ask(index, way, llms[1], mode))
        return answers[key]

    return stock_answer


def ask(index, way, llm, mode, streaming=False):
    engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=2, streaming=streaming)
    if way == "query":
        response = engine.query(QUESTION)
        return response.get_response() if hasattr(response, "response_gen") else response

    async def run():
        response = await engine.aquery(QUESTION)
        return await response.get_response() if hasattr(response, "async_response_gen") else response

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("mode", list(ResponseMode), ids=lambda mode: mode.value)
def test_every_mode_answers_as_the_stock_llm(llms, indexes, stock_answers, recorder, mode, streaming, way):
    index = indexes[way]
    if streaming and mode in NO_STREAM:
        for llm in llms:
            with pytest.raises(ValueError, match="Unable to stream"):
                ask(index, way, llm, mode, streaming)
        return
    ours = ask(index, way, llms[0], mode, streaming)
    assert str(ours) == stock_answers(index, way, mode)
    assert len(ours.source_nodes) == 2
    assert bool(recorder.events) == (mode not in NO_MODEL)
    for event in recorder.events:
        parts = event.prefix_tokens, event.reused_tokens, event.recomputed_tokens, event.fresh_tokens
        assert sum(parts) == event.prompt_tokens
        assert (event.recomputed_tokens > 50) == (mode not in NO_CHUNKS)


@pytest.mark.parametrize("mode", ["refine", "compact", "tree_summarize", "accumulate", "compact_accumulate"])
def test_every_mode_reuses_by_default(llms, indexes, recorder, mode, monkeypatch):
    """The same, with the default policy: much of each prompt comes from the store."""
    ours, engine = llms[0], llms[0].engine
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *a, **k: generate(*a, **k, recompute_ratio=0.1))
    assert ask(indexes["query"], "query", ours, mode).source_nodes
    assert recorder.events
    for event in recorder.events:
        assert event.prefix_tokens + event.reused_tokens > 80
        assert event.hits
        assert not event.misses
