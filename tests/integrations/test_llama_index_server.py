"""BlendLLM(base_url=...) against a stand-in for vLLM's server, which shows what it was sent."""

import asyncio
import gc
import pickle
import re
import sys

import pytest

pytest.importorskip("llama_index.llms.openai_like")

import openai
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.rag_blend import BlendCallbackHandler, BlendLLM, BlendVectorStore, PrecomputeKV
from llama_index_instrumentation import get_dispatcher
from openai_server import FIGURES, MODEL, PIECES, TEXT, USAGE
from rag_blend_frameworks.server import SECRET_VARIABLE, SELECTORS
from toy_llama_index import LetterEmbedding

from rag_blend import RagBlendError
from rag_blend.errors import install_hint
from rag_blend.selectors import AttentionSelector, selector_names, selector_of
from rag_blend.vllm import options, request_fields

pytest_plugins = ["server_fixture"]
HELLO = [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="Hello")]


def client(server, **config):
    return BlendLLM(base_url=server.url, **{"model": MODEL, "max_retries": 0, **config})


def call(llm, endpoint, *args, **kwargs):
    """Run one of the eight endpoints to its end; its responses, a list also where there is but one."""

    async def awaited():
        result = await getattr(llm, endpoint)(*args, **kwargs)
        return [piece async for piece in result] if "stream" in endpoint else [result]

    if endpoint.startswith("a"):
        return asyncio.run(awaited())
    result = getattr(llm, endpoint)(*args, **kwargs)
    return list(result) if "stream" in endpoint else [result]


def text_of(response):
    return response.message.content if hasattr(response, "message") else response.text


# --- what is sent


def test_a_chat_request_is_exactly_this(server):
    llm = client(server, max_new_tokens=7, selector="hkvd", recompute_ratio=0.2, namespace="acme", temperature=0)
    llm.chat(HELLO)
    assert server.body == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 7,
        "temperature": 0,
        "stream": False,
        **request_fields("acme", "hkvd", 0.2),
    }


def test_a_completion_request_is_exactly_this(server):
    client(server, is_chat_model=False, temperature=0.5).complete("Once upon")
    assert server.body == {
        "model": MODEL,
        "prompt": "Once upon",
        "max_tokens": 256,
        "temperature": 0.5,
        "stream": False,
        **request_fields(),
    }


def test_a_call_may_ask_for_something_else(server):
    llm = client(server, max_new_tokens=7)
    llm.chat(HELLO, selector="none", recompute_ratio=0.5, namespace="acme", max_tokens=3, stop=["x"])
    assert {**server.body, **request_fields("acme", "none", 0.5)} == server.body
    assert server.body["max_tokens"] == 3 and server.body["stop"] == ["x"]
    llm.chat(HELLO, max_new_tokens=4)
    assert server.body["max_tokens"] == 4


def test_a_call_may_ask_for_no_reuse(server):
    client(server).chat(HELLO, reuse=False)
    assert not {"cache_salt", "kv_transfer_params"} & server.body.keys()


def test_the_servers_secret_is_read_from_the_environment(server, monkeypatch):
    assert SECRET_VARIABLE == options.SECRET_VARIABLE
    llm = client(server)
    monkeypatch.setenv(SECRET_VARIABLE, "a secret")
    llm.chat(HELLO)
    assert server.body["cache_salt"] == request_fields(secret="a secret")["cache_salt"]
    assert "a secret" not in repr(llm) + llm.to_json()


def test_fields_that_a_tenant_was_given_win(server):
    given = request_fields("acme", secret="known to the gateway")
    client(server, additional_kwargs={"extra_body": {**given, "top_k": 5}}).chat(HELLO)
    assert {**server.body, **given, "top_k": 5} == server.body


def test_the_chat_template_gets_its_variables(server):
    client(server, chat_template_kwargs={"enable_thinking": False}).chat(HELLO)
    assert server.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_no_key_of_openai_is_sent_to_another_server(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-private")
    client(server).chat(HELLO)
    client(server, api_key="mine").chat(HELLO)
    assert server.keys == ["Bearer EMPTY", "Bearer mine"]


# --- what comes back


@pytest.mark.parametrize("endpoint", ["complete", "acomplete", "chat", "achat"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_an_answer_tells_of_reuse_as_the_local_class_does(server, endpoint, is_chat):
    (response,) = call(client(server, is_chat_model=is_chat), endpoint, HELLO if "chat" in endpoint else "Hello")
    assert text_of(response) == TEXT
    assert response.raw["rag_blend"] == FIGURES
    assert response.raw["usage"].items() >= USAGE.items()


@pytest.mark.parametrize("endpoint", ["stream_complete", "astream_complete", "stream_chat", "astream_chat"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_ends_with_the_usage(server, endpoint, is_chat):
    pieces = call(client(server, is_chat_model=is_chat), endpoint, HELLO if "chat" in endpoint else "Hello")
    assert [piece.delta for piece in pieces if piece.delta] == PIECES
    assert text_of(pieces[-1]) == TEXT
    assert pieces[-1].raw["usage"].items() >= USAGE.items()
    assert "rag_blend" not in pieces[-1].raw  # vLLM does not say it in streams
    assert {**server.body, **request_fields()} == server.body


def test_a_server_that_does_not_blend_says_nothing_of_it(server):
    server.blends = False
    assert "rag_blend" not in client(server).complete("Hello").raw


def test_leaving_a_stream_ends_the_request(server):
    """When Python collects it: the `openai` package's streams refer to themselves."""
    server.endless = True
    stream = client(server).stream_chat(HELLO)
    next(stream)
    stream.close()
    gc.collect()
    assert server.left.wait(10)


def test_listeners_and_counters_see_the_same(server):
    class Recorder(BaseEventHandler):
        def handle(self, event, **kwargs):
            if isinstance(event, LLMChatEndEvent):
                seen.append(event.response.raw["rag_blend"])

    seen, handler, counter = [], Recorder(), TokenCountingHandler(tokenizer=str.split)
    get_dispatcher().add_event_handler(handler)
    try:
        client(server, callback_manager=CallbackManager([counter])).chat(HELLO)
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert seen == [FIGURES]
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (100, 2)


def test_a_query_engine_answers(server):
    index = VectorStoreIndex.from_documents(
        [Document(text="The warranty lasts two years.")], embed_model=LetterEmbedding()
    )
    response = index.as_query_engine(llm=client(server)).query("How long is the warranty?")
    assert response.response == TEXT
    assert "The warranty lasts two years." in server.body["messages"][-1]["content"]


# --- what it is


def test_it_is_an_llm_of_llama_index(server):
    llm = client(server, context_window=8192, max_new_tokens=9)
    assert isinstance(llm, LLM) and isinstance(llm, BaseLLM) and isinstance(llm, OpenAILike)
    assert (llm.metadata.context_window, llm.metadata.num_output) == (8192, 9)
    assert llm.metadata.is_chat_model and llm.metadata.model_name == MODEL


def test_it_survives_pickling_and_dumping(server):
    llm = client(server, selector="none", max_new_tokens=9, api_key="mine", chat_template_kwargs={"a": 1})
    llm.chat(HELLO)  # has a connection now
    for copy in (pickle.loads(pickle.dumps(llm)), type(llm).from_json(llm.to_json())):
        assert copy.to_dict() == llm.to_dict()
        assert copy.complete("Hello").raw["rag_blend"] == FIGURES
        assert server.bodies[-1]["cache_salt"] == request_fields(selector="none")["cache_salt"]


def test_after_close_it_answers_again(server):
    llm = client(server)
    llm.chat(HELLO)
    llm.close()
    assert llm.chat(HELLO).message.content == TEXT


def test_without_base_url_it_is_the_local_class():
    llm = BlendLLM("somewhere", base_url=None)
    assert type(llm) is BlendLLM
    assert type(pickle.loads(pickle.dumps(llm))) is BlendLLM


# --- what is refused


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"storage": "kv/"}, "leave out storage"),
        ({"engine": object(), "prime": "none"}, "leave out engine, prime"),
        ({"engine_options": {"device": "cpu"}}, "leave out engine_options"),
        ({"model": None}, "name the server and its model"),
        ({"temprature": 0}, "temprature"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"selector": "anchor"}, "vLLM has the selectors heads, hkvd, random, none, all, not 'anchor'"),
        ({"recompute_ratio": "auto"}, "recompute_ratio"),
    ],
)
def test_a_client_is_not_made_with(config, said):
    with pytest.raises(ValueError, match=said):
        BlendLLM(base_url="http://somewhere/v1", **{"model": MODEL, **config})


def test_the_selectors_are_those_of_vllm():
    selectors = {name: selector_of(name) for name in selector_names()}
    unable = {name for name, kind in selectors.items() if isinstance(kind, AttentionSelector) or kind.shifts_rest}
    assert {"anchor", "probe", "spread"} == unable and set(SELECTORS) == selectors.keys() - unable


def test_a_wrong_argument_of_a_call_is_not_taken_for_an_empty_answer(server):
    """LlamaIndex's refine step swallows ValueError and TypeError."""
    for endpoint in ("chat", "stream_chat", "achat", "astream_chat"):
        with pytest.raises(RagBlendError, match="vLLM has the selectors"):
            call(client(server), endpoint, HELLO, selector="anchor")
        with pytest.raises(RagBlendError, match="temprature"):
            call(client(server), endpoint, HELLO, temprature=0)
    assert not server.bodies


@pytest.mark.parametrize(
    "wish",
    [
        lambda llm: llm.attach(object()),
        lambda llm: llm.engine,
        lambda llm: PrecomputeKV(llm),
        lambda llm: BlendCallbackHandler(llm),
    ],
)
def test_a_client_says_where_chunks_are_ingested(wish):
    with pytest.raises(RagBlendError, match="Fill the server's store with a local engine"):
        wish(BlendLLM(base_url="http://somewhere/v1", model=MODEL))


def test_a_store_around_a_client_keeps_nodes_and_warns(caplog):
    store = BlendVectorStore(SimpleVectorStore(), BlendLLM(base_url="http://somewhere/v1", model=MODEL))
    assert store.add([TextNode(id_="1", text="The warranty lasts two years.", embedding=[1.0])]) == ["1"]
    assert "Fill the server's store with a local engine" in caplog.text


def test_subclasses_are_derived_from_the_class_of_clients():
    class Mine(BlendLLM):
        pass

    with pytest.raises(TypeError, match=r"derive from .*\.server\.BlendServerLLM"):
        Mine(base_url="http://somewhere/v1", model=MODEL)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_index.llms.openai_like", None)
    monkeypatch.delitem(sys.modules, "llama_index.llms.rag_blend.server", raising=False)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_hint("server"))):
        BlendLLM(base_url="http://somewhere/v1", model=MODEL)


# --- errors


ENDPOINTS = [a + stream + kind for a in ("", "a") for stream in ("", "stream_") for kind in ("complete", "chat")]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_unknown_model_is_a_readable_error(server, endpoint):
    with pytest.raises(openai.NotFoundError) as error:
        call(client(server, model="other"), endpoint, HELLO if "chat" in endpoint else "Hello")
    assert f"{server.url} does not serve the model 'other'" in str(error.value)
    assert "The model `other` does not exist." in str(error.value)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_server_is_a_readable_error(endpoint):
    llm = BlendLLM(base_url="http://127.0.0.1:9/v1", model=MODEL, max_retries=0)
    with pytest.raises(
        openai.APIConnectionError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached \(.*(refused|attempts failed)"
    ):
        call(llm, endpoint, HELLO if "chat" in endpoint else "Hello")


def test_a_timeout_is_a_readable_error(server):
    server.delay_s = 1
    with pytest.raises(openai.APITimeoutError, match=f"{server.url} did not answer in time; give timeout="):
        client(server, timeout=0.1).chat(HELLO)


# --- LlamaIndex's own class, without anything of ours


def test_stock_openai_like_is_not_blended(server):
    llm = OpenAILike(MODEL, api_base=server.url, api_key="-", is_chat_model=True)
    assert llm.complete("Hello").text == TEXT
    assert not {"cache_salt", "kv_transfer_params"} & server.body.keys()


def test_stock_openai_like_blends_by_extra_body(server):
    llm = OpenAILike(
        MODEL, api_base=server.url, api_key="-", is_chat_model=True,
        additional_kwargs={"extra_body": request_fields(selector="heads")},
    )  # fmt: skip
    assert llm.complete("Hello").raw.kv_transfer_params == {"rag_blend": FIGURES}
