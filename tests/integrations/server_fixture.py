"""A stand-in for vLLM's server, for the time of a test; a plug-in."""

import pytest
from openai_server import FakeVLLM

from rag_blend.vllm.options import SECRET_VARIABLE


@pytest.fixture
def server(monkeypatch):
    """One that runs, and no secret of somebody's in the environment."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    fake = FakeVLLM()
    yield fake
    fake.close()
