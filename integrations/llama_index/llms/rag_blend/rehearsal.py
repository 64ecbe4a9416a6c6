"""What an engine puts in front of the context, found out by letting it ask without answering.

Query engines, synthesizers and chat engines build their prompts in many ways (template variables, function mappings,
system prompts, prefix messages, history). Instead of following each of them, the engine is given one stand-in node and
its prompt is taken down where it arrives, at the LLM, which then answers with nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.schema import NodeWithScore, TextNode
from rag_blend_frameworks.prompts import Prompt

STAND_IN = "Zqxjzkvw"

_prompts: ContextVar[list[Prompt] | None] = ContextVar("rag_blend_rehearsal", default=None)


def is_rehearsed(prompt: Prompt) -> bool:
    """Take a prompt down if this is a rehearsal; tell whether it is one."""
    prompts = _prompts.get()
    if prompts is None:
        return False
    prompts.append(prompt)
    return True


def front_of(engine: Any) -> Prompt:
    """Return the rendered text that an engine puts in front of the context.

    Args:
        engine: A query engine, chat engine or response synthesizer that uses a BlendLLM. Its memory is left alone.

    Returns:
        The text, and whether it gets special tokens.

    Raises:
        TypeError: It is none of these, or leaves retrieval and answer to other engines.
        ValueError: Its prompts do not show the context, or it asks another LLM.
    """
    synthesizer = _synthesizer_of(engine)
    node = NodeWithScore(node=TextNode(text=STAND_IN), score=1.0)
    with _rehearsal() as prompts:
        try:
            response = synthesizer.synthesize("?", nodes=[node])
        except NotImplementedError:
            raise TypeError(_no_engine(engine)) from None
        if isinstance(response, StreamingResponse):
            response.get_response()
    for text, special in prompts:
        if STAND_IN in text:
            return Prompt(text[: text.index(STAND_IN)], special)
    raise ValueError(
        f"{type(engine).__name__} has asked this LLM {len(prompts)} times, but no prompt shows the context: there is "
        "no text in front of it to cache behind"
    )


@contextmanager
def _rehearsal() -> Iterator[list[Prompt]]:
    prompts: list[Prompt] = []
    token = _prompts.set(prompts)
    try:
        yield prompts
    finally:
        _prompts.reset(token)


def _synthesizer_of(engine: Any) -> Any:
    """Return what has a `synthesize` that takes a question and nodes."""
    if hasattr(engine, "_get_response_synthesizer"):  # chat engines make one for every turn
        return engine._get_response_synthesizer([])
    inner = getattr(engine, "_query_engine", engine)  # of a chat engine that condenses the question
    if not hasattr(inner, "synthesize"):
        raise TypeError(_no_engine(engine))
    return inner


def _no_engine(engine: Any) -> str:
    return (
        f"{type(engine).__name__} does not put retrieved text into a prompt itself; give the query or chat engine that "
        "does, or its response synthesizer"
    )
