"""The frameworks' own tracing carries what the engine measured: nothing of ours has to be installed for it."""

import json

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("langchain_core")

from langchain_core.messages import HumanMessage
from langchain_core.tracers.base import BaseTracer
from langchain_rag_blend import BlendLLM as LangChainLLM
from langchain_rag_blend import ChatBlend
from langchain_toys import toy_engine
from llama_index.llms.rag_blend import BlendLLM
from llama_index.llms.rag_blend.events import explain
from test_llama_index_hooks import call
from toy_llama_index import CHAT_TEMPLATE, byte_tokenizer, tiny_model

from rag_blend import BlendEngine, GenerationStats


@pytest.fixture(scope="module")
def exporter():
    """LlamaIndex's own OpenTelemetry integration, which a process can have once, on an exporter in memory."""
    pytest.importorskip("llama_index.observability.otel")
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.observability.otel import LlamaIndexOpenTelemetry
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    dispatcher, exporter = get_dispatcher(), InMemorySpanExporter()
    before = list(dispatcher.span_handlers), list(dispatcher.event_handlers)
    LlamaIndexOpenTelemetry(span_exporter=exporter, span_processor="simple").start_registering()
    yield exporter
    dispatcher.span_handlers, dispatcher.event_handlers = before


@pytest.mark.parametrize("endpoint", ["complete", "acomplete", "chat", "achat"])
def test_an_open_telemetry_span_of_llama_index_has_the_figures(exporter, endpoint):
    exporter.clear()
    with BlendEngine(tiny_model(), byte_tokenizer(CHAT_TEMPLATE), None, prime="none") as engine:
        (response,) = call(BlendLLM(engine=engine, max_new_tokens=4), endpoint)
    (span,) = [span for span in exporter.get_finished_spans() if span.name.startswith(f"BlendLLM.{endpoint}-")]
    (event,) = [event for event in span.events if event.name == "BlendEvent"]
    figures = response.raw["rag_blend"]
    assert figures["prompt_tokens"] > 0
    assert {name: event.attributes[name] for name in figures} == figures


class Runs(BaseTracer):
    """Keeps what LangChain hands to every tracer: LangSmith, OpenTelemetry, one's own."""

    def __init__(self):
        super().__init__()
        self.finished = []

    def _persist_run(self, run):
        self.finished.append(run)


@pytest.fixture
def engine():
    with toy_engine() as made:
        yield made


@pytest.mark.parametrize("streams", [False, True])
def test_a_run_of_langchain_has_the_figures(engine, streams):
    tracer, model = Runs(), ChatBlend(engine=engine, max_tokens=4)
    asked = [HumanMessage("the river")], {"callbacks": [tracer]}
    if streams:
        list(model.stream(*asked))
    else:
        model.invoke(*asked)
    (run,) = tracer.finished
    message = json.loads(json.dumps(run.outputs["generations"][0][0]["message"]))["kwargs"]
    figures = message["response_metadata"]["rag_blend"]
    assert figures["prompt_tokens"] == message["usage_metadata"]["input_tokens"] > 0
    assert figures["ttft_s"] > 0


def test_a_run_of_a_text_model_has_the_figures(engine):
    tracer = Runs()
    LangChainLLM(engine=engine, max_tokens=4).invoke("the river", {"callbacks": [tracer]})
    (run,) = tracer.finished
    info = run.outputs["generations"][0][0]["generation_info"]
    assert info["rag_blend"]["prompt_tokens"] == info["usage_metadata"]["input_tokens"] > 0


def test_the_note_tells_what_was_left_alone_on_purpose():
    stats = GenerationStats(prompt_tokens=90, fresh_tokens=90, declined=2)
    assert explain(stats, foreign_head=False, full_prefill=False) == (
        "2 cached chunks were left alone, since computing them takes no longer"
    )
