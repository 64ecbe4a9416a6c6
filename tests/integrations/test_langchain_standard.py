"""The standard suites of langchain-tests, on real engines with tiny random models.

A random model calls no tools, so the tests of tools run on one that is made to say what an obedient model would say:
everything but the choice of the tokens is real.
"""

import pytest

pytest.importorskip("langchain_tests")

from conftest import random_text
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_blend import BlendVectorStore, ChatBlend
from langchain_tests.integration_tests import ChatModelIntegrationTests, VectorStoreIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_toys import obedient, save_toy, scripted_engine, toy_engine


@pytest.fixture(scope="module")
def tool_model_dir(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("tools"), "tools")


@pytest.fixture(scope="module")
def plain_engine():
    with toy_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def tool_engine():
    with scripted_engine(obedient) as engine:
        yield engine


class TestUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _model_dir(self, tool_model_dir, tmp_path):
        self._params = {"model": tool_model_dir, "storage": str(tmp_path)}

    @property
    def chat_model_class(self):
        return ChatBlend

    @property
    def chat_model_params(self):
        return self._params

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_model_override(self):
        return False  # one model per object


class OnAnEngine(ChatModelIntegrationTests):
    """Common to both integration suites."""

    __test__ = False
    max_tokens = 200

    @property
    def chat_model_class(self):
        return ChatBlend

    @property
    def chat_model_params(self):
        return {"engine": self.engine, "max_tokens": self.max_tokens}

    @property
    def supports_model_override(self):
        return False  # one model per object

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        text = random_text(7)
        self.engine.ingest([text], progress=False)
        llm = ChatBlend(engine=self.engine, recompute_ratio=None)
        message = None
        if stream:
            for chunk in llm.stream(text):
                message = chunk if message is None else message + chunk
        else:
            message = llm.invoke(text)
        assert isinstance(message, AIMessage)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 50
        return message


class TestPlainModel(OnAnEngine):
    """Its chat template has no place for tools."""

    __test__ = True
    max_tokens = 20

    @pytest.fixture(autouse=True)
    def _engine(self, plain_engine):
        self.engine = plain_engine

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False  # it could, but a random model writes no JSON


class TestToolModel(OnAnEngine):
    """It calls tools and answers in JSON."""

    __test__ = True

    @pytest.fixture(autouse=True)
    def _engine(self, tool_engine):
        self.engine = tool_engine

    @property
    def supports_json_mode(self):
        return True


class TestToolModelInJson(OnAnEngine):
    """The same, with structured output by a description of the schema instead of a tool."""

    __test__ = True

    @pytest.fixture(autouse=True)
    def _engine(self, tool_engine):
        self.engine = tool_engine

    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}


class TestVectorStore(VectorStoreIntegrationTests):
    """The wrapper around LangChain's own store; texts of three letters are too short to be cached."""

    @pytest.fixture
    def vectorstore(self, plain_engine):
        store = BlendVectorStore(InMemoryVectorStore(self.get_embeddings()), ChatBlend(engine=plain_engine))
        yield store
        store.delete(list(store.inner.store))
