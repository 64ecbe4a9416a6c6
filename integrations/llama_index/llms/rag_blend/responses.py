"""Engine results -> LlamaIndex response objects. Plain Python values only, never a tensor."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
)

from rag_blend import Generation, GenerationStats, TextStream


def raw_usage(stats: GenerationStats | None, completion_tokens: int) -> dict[str, Any] | None:
    """Return the `raw` of a response: token usage as LlamaIndex's counters read it, and all the figures.

    Args:
        stats: What the engine measured; None when the request ended before anything was computed.
        completion_tokens: Number of generated tokens.

    Returns:
        A dict with `usage` (OpenAI's names, reused tokens as `cached_tokens`) and `rag_blend`.
    """
    if stats is None:
        return None
    return {
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": stats.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": stats.prefix_tokens + stats.reused_tokens},
        },
        "rag_blend": dataclasses.asdict(stats),
    }


def completion(generation: Generation) -> CompletionResponse:
    """Return the finished answer as a completion."""
    raw = raw_usage(generation.stats, len(generation.token_ids))
    return CompletionResponse(text=generation.text, raw=raw)


def completion_chunks(stream: TextStream) -> Iterator[CompletionResponse]:
    """Yield a chunk per piece of text, then an empty one that carries the usage.

    The usage is known only after the last token. Holding every piece back until its successor arrives
    would put it on the last piece, but would show each word one token late.
    """
    text = ""
    for piece in stream:
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    yield CompletionResponse(text=text, delta="", raw=raw_usage(stream.stats, len(stream.token_ids)))


def as_chat(response: CompletionResponse) -> ChatResponse:
    """Return a completion, or one chunk of it, as the chat response with the same content."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=response.text)
    return ChatResponse(message=message, delta=response.delta, raw=response.raw)
