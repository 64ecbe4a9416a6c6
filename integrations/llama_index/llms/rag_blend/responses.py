"""Engine results -> LlamaIndex response objects. Plain Python values only, never a tensor."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    MessageRole,
)

from rag_blend import Generation, GenerationStats, TextStream

Report = Callable[[GenerationStats | None, int], dict[str, Any] | None]
"""From an answer's stats and its number of tokens to the `raw` of the response."""


def completion(generation: Generation, report: Report) -> CompletionResponse:
    """Return the finished answer as a completion, with what `report` says of it in `raw`."""
    return CompletionResponse(text=generation.text, raw=report(generation.stats, len(generation.token_ids)))


def completion_chunks(stream: TextStream, report: Report) -> Iterator[CompletionResponse]:
    """Yield a chunk per piece of text, then an empty one with what `report` says in `raw`.

    The usage is known only after the last token. Holding every piece back until its successor arrives
    would put it on the last piece, but would show each word one token late.
    """
    text = ""
    for piece in stream:
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    yield CompletionResponse(text=text, delta="", raw=report(stream.stats, len(stream.token_ids)))


def as_chat(response: CompletionResponse) -> ChatResponse:
    """Return a completion, or one chunk of it, as the chat response with the same content."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=response.text)
    return ChatResponse(message=message, delta=response.delta, raw=response.raw)


def chat_chunks(chunks: CompletionResponseGen) -> ChatResponseGen:
    """Yield the chunks of a completion as those of a chat response."""
    with closing(chunks):
        for chunk in chunks:
            yield as_chat(chunk)
