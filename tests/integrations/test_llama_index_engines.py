# ruff: noqa: F811  (fixtures are imported)
"""Engines built of engines, rerankers, unusual chunks, structured answers, and the contract of LlamaIndex's tests."""

import asyncio
import logging
import uuid

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import PromptTemplate, Settings, SummaryIndex
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.extractors import KeywordExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import Document
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.rag_blend import BlendLLM, PrecomputeKV
from pydantic import BaseModel
from toy_llama_index import (
    BOS,
    CHAT_TEMPLATE,
    TEXTS,
    byte_tokenizer,
    documents,
    llm_text,
    make_index,
    one_thread,  # noqa: F401
    recorder,  # noqa: F401
    tiny_model,
)

from rag_blend import BlendEngine, Generation, GenerationStats

QUESTION = "Which bees keep the brood warm?"


@pytest.fixture(params=["chat", "text"])
def llm(request, monkeypatch):
    tokenizer = byte_tokenizer(BOS + CHAT_TEMPLATE if request.param == "chat" else None)
    options = {"storage": None, "prime": "none", "prefix_cache_bytes": 0}
    with BlendEngine(tiny_model(layers=2), tokenizer, **options) as engine:
        made = BlendLLM(engine=engine, max_new_tokens=4)
        monkeypatch.setattr(Settings, "_llm", made)
        yield made


@pytest.fixture
def index(llm):
    made = make_index(documents())
    llm.attach(made, show_progress=False)
    return made


def reused(event):
    return event.prefix_tokens + event.reused_tokens


# --- engines of engines


def test_a_retriever_query_engine_with_any_synthesizer(llm, index, recorder):
    synthesizer = get_response_synthesizer(llm=llm, response_mode="compact")
    engine = RetrieverQueryEngine(index.as_retriever(similarity_top_k=3), response_synthesizer=synthesizer)
    assert len(engine.query(QUESTION).source_nodes) == 3
    assert reused(recorder.events[-1]) > 200


class First(BaseSelector):
    """Always selects the first choice."""

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass

    def _select(self, choices, query):
        return SelectorResult(selections=[SingleSelection(index=0, reason="it is the first")])

    async def _aselect(self, choices, query):
        return self._select(choices, query)


def tools(llm, index):
    return [QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), name=name, description=name) for name in "ab"]


def test_a_router_reuses_in_the_engine_it_chooses(llm, index, recorder):
    router = RouterQueryEngine(selector=First(), query_engine_tools=tools(llm, index), llm=llm)
    assert router.query(QUESTION).source_nodes
    assert asyncio.run(router.aquery(QUESTION)).source_nodes
    assert [event.hits > 1 for event in recorder.events] == [True, True]


class TwoQuestions(BaseQuestionGenerator):
    """Asks the same of two tools."""

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass

    def generate(self, tools, query):
        return [SubQuestion(sub_question=f"{query.query_str} {tool.name}?", tool_name=tool.name) for tool in tools]

    async def agenerate(self, tools, query):
        return self.generate(tools, query)


@pytest.mark.parametrize("use_async", [False, True])
def test_sub_questions_reuse_and_their_answers_are_put_together(llm, index, recorder, use_async):
    engine = SubQuestionQueryEngine(
        question_gen=TwoQuestions(),
        response_synthesizer=get_response_synthesizer(llm=llm),
        query_engine_tools=tools(llm, index),
        use_async=use_async,
        verbose=False,
    )
    assert str(engine.query("Which bees"))
    assert sorted(event.hits > 1 for event in recorder.events) == [False, True, True]


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_fusion_retriever(llm, index, recorder, num_queries):
    retrievers = [index.as_retriever(similarity_top_k=k) for k in (2, 3)]
    fusion = QueryFusionRetriever(retrievers, llm=llm, num_queries=num_queries, similarity_top_k=3, use_async=False)
    response = RetrieverQueryEngine.from_args(fusion, llm=llm).query(QUESTION)
    assert len(response.source_nodes) == 3
    assert len(recorder.events) == (1 if num_queries == 1 else 2)
    assert reused(recorder.events[-1]) > 200


class Backwards(BaseNodePostprocessor):
    """A reranker of the worst kind."""

    def _postprocess_nodes(self, nodes, query_bundle=None):
        return nodes[::-1]


@pytest.mark.parametrize(
    "postprocessors",
    [[Backwards()], [LongContextReorder()], [SimilarityPostprocessor(similarity_cutoff=0.1), Backwards()]],
    ids=["reranker", "reorder", "cutoff"],
)
def test_the_order_of_chunks_does_not_matter(llm, index, recorder, postprocessors):
    engine = index.as_query_engine(llm=llm, similarity_top_k=4, node_postprocessors=postprocessors)
    engine.query(QUESTION)
    event = recorder.events[-1]
    assert (event.hits >= 4, event.misses) == (True, 0)
    assert event.fresh_tokens < 150


# --- unusual chunks


def test_a_chunk_that_occurs_twice_is_reused_twice(llm, recorder):
    twins = [Document(text=TEXTS["bees"], id_=name) for name in ("one", "two")]
    index = make_index(twins)
    assert llm.attach(index, show_progress=False).chunks == 1
    index.as_query_engine(llm=llm).query(QUESTION)
    event = recorder.events[-1]
    assert reused(event) + event.recomputed_tokens > len(llm.head()) + 2 * len(TEXTS["bees"]) - 10


def test_metadata_headers_are_part_of_the_chunk(llm, recorder):
    docs = documents("bees")
    docs[0].metadata |= {"file_path": "/data/insects/bees.txt", "secret": "4711"}
    docs[0].excluded_llm_metadata_keys = ["secret"]
    index = make_index(docs)
    llm.attach(index, show_progress=False)
    index.as_query_engine(llm=llm).query(QUESTION)
    event = recorder.events[-1]
    text = index.docstore.get_nodes([*index.docstore.docs])[0].get_content("llm")
    assert "insects" in text
    assert "4711" not in text
    assert reused(event) + event.recomputed_tokens > len(llm.head()) + len(text) - 5


def test_a_template_of_ones_own_is_exact_from_its_start_to_the_end_of_the_first_chunk(llm, recorder):
    template = PromptTemplate("Read this with care, please.\n\n{context_str}\n\nNow: {query_str}\n")
    index = make_index(documents())
    llm.attach(index, text_qa_template=template, show_progress=False)
    response = index.as_query_engine(llm=llm, text_qa_template=template).query(QUESTION)
    first = response.source_nodes[0].node.ref_doc_id
    assert recorder.events[-1].prefix_tokens > len(llm.head(template)) + len(llm_text(first)) - 5


def test_an_index_without_a_vector_store_is_answered(llm, recorder):
    summary = SummaryIndex.from_documents(documents("bees", "bread"))
    assert str(summary.as_query_engine(llm=llm, response_mode="tree_summarize").query(QUESTION)) is not None
    assert recorder.events


# --- structured answers


class Hive(BaseModel):
    """A hive."""

    name: str
    bees: int


class JsonEngine:
    """Stands in for a model that can write JSON; a random one cannot."""

    def __init__(self, text, tokenizer):
        self.text, self.tokenizer, self.prompts = text, tokenizer, []
        self.model_name, self.context_window = "json", 4096
        self.policy = type("Policy", (), {"full_prefill": False})

    def generate(self, prompt, **options):
        self.prompts.append(prompt)
        return Generation(self.text, [1], GenerationStats(prompt_tokens=3, fresh_tokens=3))


ANSWER = 'Here it is: {"name": "south", "bees": 40000}'


def test_structured_answers_go_through_the_text_path():
    engine = JsonEngine(ANSWER, byte_tokenizer(BOS + CHAT_TEMPLATE))
    llm = BlendLLM(engine=engine)
    hive = Hive(name="south", bees=40000)
    template = PromptTemplate("Describe the hive in the {where}.")
    assert llm.structured_predict(Hive, template, where="south") == hive
    assert asyncio.run(llm.astructured_predict(Hive, template, where="south")) == hive
    structured = llm.as_structured_llm(Hive)
    assert structured.complete("Describe it.").raw == hive
    assert structured.chat([ChatMessage(content="Describe it.")]).raw == hive
    assert LLMTextCompletionProgram.from_defaults(output_cls=Hive, prompt=template, llm=llm)(where="south") == hive
    response = make_index(documents("bees")).as_query_engine(llm=structured).query(QUESTION)
    assert response.response == hive
    assert all('"bees"' in prompt for prompt in engine.prompts)  # the schema


def test_a_model_that_writes_no_json_gets_llama_indexs_own_error(llm):
    with pytest.raises(ValueError, match=r"(?i)could not .*json"):
        llm.structured_predict(Hive, PromptTemplate("Describe the hive."))


# --- the contract that llama-index-core checks of its own classes, under the names its tests have


class TestLlmsTestCustom:
    """llama-index-core/tests/llms/test_custom.py."""

    def test_basic(self, llm):
        assert llm.complete("p").text is not None
        assert llm.chat([ChatMessage(content="p")]).message.content is not None

    def test_streaming(self, llm):
        assert [*llm.stream_complete("p")][-1].text == llm.complete("p").text
        assert [*llm.stream_chat([ChatMessage(content="p")])][-1].message.role == "assistant"

    def test_llm_id(self, llm):
        name = uuid.uuid4().hex
        with pytest.raises(ValueError, match="id_"):  # upstream ignores what it does not know, we refuse it
            BlendLLM(engine=llm.engine, id_=name)


class TestLlmsTestCallbacks:
    """llama-index-core/tests/llms/test_callbacks.py; its tests of nonyielding streams concern a mock only."""

    def test_llm_complete_prompt_arg_and_kwarg(self, llm):
        assert llm.complete("p").text == llm.complete(prompt="p").text

    def test_llm_complete_throws_if_duplicate_prompt(self, llm):
        with pytest.raises(TypeError):
            llm.complete("p", prompt="p")

    def test_llm_complete_throws_if_no_prompt(self, llm):
        with pytest.raises(ValueError, match="prompt"):
            llm.complete()

    def test_llm_stream_complete_prompt_arg_and_kwarg(self, llm):
        answers = [
            "".join(part.delta for part in s) for s in (llm.stream_complete("p"), llm.stream_complete(prompt="p"))
        ]
        assert answers[0] == answers[1]

    def test_llm_stream_complete_throws_if_duplicate_prompt(self, llm):
        with pytest.raises(TypeError):
            llm.stream_complete("p", prompt="p")

    def test_llm_stream_complete_throws_if_no_prompt(self, llm):
        with pytest.raises(ValueError, match="prompt"):
            llm.stream_complete()

    def test_to_payload_includes_model_and_excludes_secrets(self, llm):
        payload = llm.to_payload()
        assert payload["model_name"] == llm.metadata.model_name
        assert payload["class_name"] == "rag_blend_llm"
        assert "engine" not in repr(payload)

    def test_callback_serialized_excludes_secrets(self, llm):
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm.callback_manager = CallbackManager([debug])
        llm.complete("p")
        (pair,) = debug.get_event_pairs(CBEventType.LLM)
        assert pair[0].payload[EventPayload.SERIALIZED]["class_name"] == "rag_blend_llm"
        assert pair[1].payload[EventPayload.COMPLETION].raw["usage"]["completion_tokens"] == 4


class TestIngestionTestPipeline:
    """llama-index-core/tests/ingestion/test_pipeline.py, with our LLM and our step; others are in test_..._hooks.py."""

    def pipeline(self, llm, **options):
        splitter = SentenceSplitter(chunk_size=200, chunk_overlap=0)
        steps = [splitter, KeywordExtractor(llm=llm, num_workers=1, show_progress=False), PrecomputeKV(llm)]
        return IngestionPipeline(transformations=steps, **options)

    def test_build_pipeline(self, llm):
        assert len(self.pipeline(llm).transformations) == 3

    def test_run_pipeline(self, llm):
        (node,) = self.pipeline(llm).run(documents=documents("bees"))
        assert "excerpt_keywords" in node.metadata
        report = llm.engine.ingest([node.get_content("llm")], head=llm.head(), progress=False)
        assert report.chunks == 0

    def test_arun_pipeline(self, llm):
        (node,) = asyncio.run(self.pipeline(llm).arun(documents=documents("bees")))
        assert "excerpt_keywords" in node.metadata

    def test_run_pipeline_with_ref_doc_id(self, llm):
        (node,) = self.pipeline(llm).run(documents=documents("bees"))
        assert node.ref_doc_id == "bees"

    def test_save_load_pipeline(self, llm, tmp_path):
        pipeline = self.pipeline(llm)
        pipeline.run(documents=documents("bees"))
        pipeline.persist(str(tmp_path))
        again = self.pipeline(llm)
        again.load(str(tmp_path))
        again.transformations[0] = pipeline.transformations[0]  # its ids are in the cache's keys
        before = [*pipeline.cache.cache.get_all(pipeline.cache.collection)]
        assert len(again.run(documents=documents("bees"))) == 1
        assert [*again.cache.cache.get_all(again.cache.collection)] == before

    def test_pipeline_with_transform_error(self, llm, monkeypatch, caplog):
        """Upstream: an error fails the run. Ours: a cache that cannot be written does not."""
        monkeypatch.setattr(llm.engine, "ingest", lambda *a, **k: 1 / 0)
        with caplog.at_level(logging.WARNING):
            assert len(self.pipeline(llm).run(documents=documents("bees"))) == 1
        assert "ZeroDivisionError" in caplog.text
