"""After an answer: figures for the response, an event for the dispatcher, a word to those who listen."""

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from llama_index.llms.rag_blend.events import BlendEvent, explain
from llama_index_instrumentation import get_dispatcher
from rag_blend_frameworks.prompts import Prompt, token_ids

from rag_blend import GenerationStats

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM

logger = logging.getLogger(__name__)
dispatcher = get_dispatcher(__name__)

_FOREIGN = (
    "%d cached chunks lie in a prompt but are not reused: it begins with another text than they were cached behind. "
    "If the template, the system prompt or the engine has changed, cache for it: llm.attach(index, engine=...). "
    "Said once; `raw['rag_blend']['note']` and the BlendEvent of every call tell more."
)


def report(
    llm: "BlendLLM", prompt: Prompt, stats: GenerationStats | None, completion_tokens: int, span_id: str | None
) -> dict[str, Any] | None:
    """Tell the dispatcher, listeners and the log about an answered prompt.

    Args:
        llm: Which has answered.
        prompt: The prompt.
        stats: What the engine measured; None when the request ended before anything was computed.
        completion_tokens: Number of generated tokens.
        span_id: Of the LLM call.

    Returns:
        The response's `raw`: `usage` (OpenAI's names, as LlamaIndex's counters read it, reused tokens as
        `cached_tokens`) and `rag_blend` (all figures, and a `note` on why not more was reused).
    """
    if stats is None:
        return None
    figures = {**dataclasses.asdict(stats), "note": _note(llm, prompt, stats)}
    dispatcher.event(
        BlendEvent(model_name=llm.metadata.model_name, completion_tokens=completion_tokens, span_id=span_id, **figures)
    )
    for listener in list(llm.handle.listeners):
        listener.answered(prompt)
    usage = {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": stats.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.prefix_tokens + stats.reused_tokens},
    }
    return {"usage": usage, "rag_blend": figures}


def _note(llm: "BlendLLM", prompt: Prompt, stats: GenerationStats) -> str:
    heads = llm.handle.heads
    foreign = bool(stats.misses_elsewhere) and not heads.begin(token_ids(llm.engine.tokenizer, prompt))
    if foreign and not stats.hits and heads.tell_once():
        logger.warning(_FOREIGN, stats.misses_elsewhere)
    return explain(stats, foreign, llm.engine.policy.full_prefill)
