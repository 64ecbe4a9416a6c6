"""ChatBlend(base_url=...) against a stand-in for vLLM's server, which shows what it was sent."""

import asyncio
import pickle
import re
import sys

import pytest

pytest.importorskip("langchain_openai")

import openai
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.embeddings import FakeEmbeddings
from langchain_core.exceptions import ModelConnectionError, ModelNotFoundError, ModelTimeoutError
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumps
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAI
from langchain_rag_blend import BlendCallbackHandler, BlendLLM, BlendVectorStore, ChatBlend, PrecomputeKV
from langchain_rag_blend.server import ChatBlendServer
from langchain_tests.unit_tests import ChatModelUnitTests
from openai_server import FIGURES, MODEL, PIECES, TEXT, USAGE
from rag_blend_frameworks.server import SECRET_VARIABLE

from rag_blend import RagBlendError
from rag_blend.errors import install_hint
from rag_blend.vllm import request_fields

pytest_plugins = ["server_fixture"]
DOCUMENTS = [Document("The warranty lasts two years.", id="1")]
NOWHERE = "http://127.0.0.1:9/v1"


def client(server, **config):
    return ChatBlend(base_url=server.url, **{"model": MODEL, "max_retries": 0, **config})


async def pieces_of(stream):
    return [piece async for piece in stream]


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatBlendServer

    @property
    def chat_model_params(self):
        return {"model": MODEL, "base_url": NOWHERE}


# --- what is sent


def test_a_request_is_exactly_this(server):
    llm = client(
        server, max_new_tokens=7, selector="hkvd", recompute_ratio=0.2, namespace="acme", temperature=0, stop="x"
    )
    llm.invoke([("system", "Be kind."), ("human", "Hello")])
    assert server.body == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 7,
        "temperature": 0,
        "stop": "x",
        "stream": False,
        **request_fields("acme", "hkvd", 0.2),
    }


def test_calls_and_bindings_may_ask_for_something_else(server):
    llm = client(server)
    llm.invoke("Hello", selector="none", recompute_ratio=0.5, namespace="acme", max_new_tokens=3)
    assert {**server.body, **request_fields("acme", "none", 0.5)} == server.body
    assert server.body["max_completion_tokens"] == 3
    llm.bind(selector="all").invoke("Hello")
    assert {**server.body, **request_fields(selector="all")} == server.body
    llm.configurable_fields(selector=ConfigurableField("s")).invoke("Hello", {"configurable": {"s": "random"}})
    assert {**server.body, **request_fields(selector="random")} == server.body
    llm.invoke("Hello", reuse=False)
    assert not {"cache_salt", "kv_transfer_params"} & server.body.keys()


def test_the_servers_secret_is_read_from_the_environment_and_not_shown(server, monkeypatch):
    llm = client(server)
    monkeypatch.setenv(SECRET_VARIABLE, "a secret")
    llm.invoke("Hello")
    salt = request_fields(secret="a secret")["cache_salt"]
    assert server.body["cache_salt"] == salt
    shown = repr(llm) + dumps(llm) + str(llm._get_invocation_params())
    assert "a secret" not in shown and salt not in shown


def test_fields_that_a_tenant_was_given_win(server):
    given = request_fields("acme", secret="known to the gateway")
    client(server, extra_body={**given, "top_k": 5}).invoke("Hello")
    assert {**server.body, **given, "top_k": 5} == server.body


def test_the_chat_template_gets_its_variables(server):
    client(server, chat_template_kwargs={"enable_thinking": False}).invoke("Hello")
    assert server.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_no_key_of_openai_is_sent_to_another_server(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-private")
    client(server).invoke("Hello")
    client(server, api_key="mine").invoke("Hello")
    assert server.keys == ["Bearer EMPTY", "Bearer mine"]


# --- what comes back


def assert_tells_of_reuse(message):
    assert message.content == TEXT
    assert message.response_metadata["rag_blend"] == FIGURES
    assert message.response_metadata["model_name"] == MODEL
    assert message.usage_metadata["input_tokens"] == USAGE["prompt_tokens"]


def test_invoke_and_batch_tell_of_reuse(server):
    llm = client(server)
    assert_tells_of_reuse(llm.invoke("Hello"))
    for message in llm.batch(["Hello", "Goodbye"]):
        assert_tells_of_reuse(message)
    chain = ChatPromptTemplate.from_template("Say {what}") | llm
    assert_tells_of_reuse(chain.invoke({"what": "hello"}))


def test_ainvoke_and_abatch_tell_of_reuse(server):
    async def ask():
        llm = client(server)
        return [await llm.ainvoke("Hello"), *await llm.abatch(["Hello", "Goodbye"])]

    for message in asyncio.run(ask()):
        assert_tells_of_reuse(message)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_has_the_pieces_and_the_usage(server, is_async):
    llm = client(server)
    pieces = asyncio.run(pieces_of(llm.astream("Hello"))) if is_async else list(llm.stream("Hello"))
    assert [piece.content for piece in pieces if piece.content] == PIECES
    total = sum(pieces[1:], pieces[0])
    assert total.usage_metadata["total_tokens"] == USAGE["total_tokens"]
    assert "rag_blend" not in total.response_metadata  # vLLM does not say it in streams
    assert {**server.body, **request_fields()} == server.body


def test_leaving_a_stream_ends_the_request(server):
    server.endless = True
    stream = client(server).stream("Hello")
    next(stream)
    stream.close()
    assert server.left.wait(10)


async def test_leaving_an_awaited_stream_ends_the_request(server):
    server.endless = True
    stream = client(server).astream("Hello")
    await anext(stream)
    await stream.aclose()
    assert await asyncio.to_thread(server.left.wait, 10)


def test_a_server_that_does_not_blend_says_nothing_of_it(server):
    server.blends = False
    assert "rag_blend" not in client(server).invoke("Hello").response_metadata


def test_a_response_cache_knows_recipes_apart(server):
    cache = InMemoryCache()
    for selector in ("heads", "none", "heads"):
        client(server, selector=selector, cache=cache).invoke("Hello")
    assert len(server.bodies) == 2


# --- what it is


def test_it_is_a_chat_model_of_langchain(server):
    llm = client(server)
    assert isinstance(llm, BaseChatModel) and isinstance(llm, ChatOpenAI)
    assert llm._get_ls_params()["ls_provider"] == "rag_blend"


def test_it_survives_pickling(server):
    llm = client(server, selector="none", max_tokens=9, api_key="mine")
    llm.invoke("Hello")  # has a connection now
    copy = pickle.loads(pickle.dumps(llm))
    assert copy._get_invocation_params() == llm._get_invocation_params()
    assert_tells_of_reuse(copy.invoke("Hello"))
    assert server.bodies[0] == server.bodies[1] and server.keys == ["Bearer mine"] * 2
    copy.close()
    assert_tells_of_reuse(copy.invoke("Hello"))


def test_without_base_url_it_is_the_local_class():
    llm = ChatBlend(model="somewhere", base_url=None)
    assert type(llm) is ChatBlend
    assert type(pickle.loads(pickle.dumps(llm))) is ChatBlend


# --- what is refused


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"storage": "kv/"}, "leave out storage"),
        ({"engine": object(), "prime": "none"}, "leave out engine, prime"),
        ({"generate_kwargs": {"top_k": 5}}, "leave out generate_kwargs"),
        ({"model": None}, "name the server and its model"),
        ({"temprature": 0}, "no argument temprature"),
        ({"selector": "anchor"}, "vLLM has the selectors heads, hkvd, random, none, all, not 'anchor'"),
        ({"recompute_ratio": "auto"}, "recompute_ratio"),
    ],
)
def test_a_client_is_not_made_with(config, said):
    with pytest.raises(ValueError, match=said):
        ChatBlend(base_url=NOWHERE, **{"model": MODEL, **config})


def test_a_wrong_argument_of_a_call_is_refused(server):
    with pytest.raises(ValueError, match="vLLM has the selectors"):
        client(server).invoke("Hello", selector="anchor")
    with pytest.raises(TypeError, match="temprature"):
        client(server).invoke("Hello", temprature=0)
    assert not server.bodies


@pytest.mark.parametrize(
    "wish",
    [
        lambda llm: llm.get_engine(),
        lambda llm: llm.learn_head("head"),
        lambda llm: PrecomputeKV(llm).transform_documents(DOCUMENTS),
        lambda llm: BlendCallbackHandler(llm).on_retriever_end([], run_id=None),
    ],
)
def test_a_client_says_where_chunks_are_ingested(wish):
    with pytest.raises(RagBlendError, match="Fill the server's store with a local engine"):
        wish(ChatBlend(base_url=NOWHERE, model=MODEL))


def test_a_store_around_a_client_keeps_documents_and_warns(caplog):
    store = BlendVectorStore(InMemoryVectorStore(FakeEmbeddings(size=2)), ChatBlend(base_url=NOWHERE, model=MODEL))
    assert store.add_documents(DOCUMENTS) == ["1"]
    assert "Fill the server's store with a local engine" in caplog.text


def test_subclasses_and_completions_are_told_what_to_use():
    class Mine(ChatBlend):
        pass

    for kind in (Mine, BlendLLM):
        with pytest.raises(
            ValueError, match=r"derive from .*ChatBlendServer, or complete with langchain_openai\.OpenAI"
        ):
            kind(base_url=NOWHERE, model=MODEL)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_openai", None)
    monkeypatch.delitem(sys.modules, "langchain_rag_blend.server")
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_hint("server"))):
        ChatBlend(base_url=NOWHERE, model=MODEL)


# --- errors: LangChain's own types, with words that help


CALLS = {
    "invoke": lambda llm: llm.invoke("Hello"),
    "stream": lambda llm: list(llm.stream("Hello")),
    "ainvoke": lambda llm: asyncio.run(llm.ainvoke("Hello")),
    "astream": lambda llm: asyncio.run(pieces_of(llm.astream("Hello"))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_unknown_model_is_a_readable_error(server, call):
    with pytest.raises(ModelNotFoundError) as error:
        call(client(server, model="other"))
    assert f"{server.url} does not serve the model 'other'" in str(error.value)
    assert "The model `other` does not exist." in str(error.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_server_is_a_readable_error(call):
    with pytest.raises(
        ModelConnectionError, match=rf"{NOWHERE} cannot be reached \(.*(refused|attempts failed)"
    ) as error:
        call(ChatBlend(base_url=NOWHERE, model=MODEL, max_retries=0))
    assert isinstance(error.value, openai.APIConnectionError)


def test_a_timeout_is_a_readable_error(server):
    server.delay_s = 1
    with pytest.raises(ModelTimeoutError, match=f"{server.url} did not answer in time; give timeout="):
        client(server, timeout=0.1).invoke("Hello")


# --- LangChain's own classes, without anything of ours


def test_stock_chat_openai_is_not_blended(server):
    llm = ChatOpenAI(model=MODEL, base_url=server.url, api_key="-")
    assert llm.invoke("Hello").content == TEXT
    assert not {"cache_salt", "kv_transfer_params"} & server.body.keys()


@pytest.mark.parametrize("kind", [ChatOpenAI, OpenAI])
def test_stock_classes_blend_by_extra_body(server, kind):
    kind(model=MODEL, base_url=server.url, api_key="-", extra_body=request_fields(selector="heads")).invoke("Hello")
    assert {**server.body, **request_fields(selector="heads")} == server.body
