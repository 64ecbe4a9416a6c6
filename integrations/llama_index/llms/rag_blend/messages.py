"""Chat messages -> the one text that the model reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    VideoBlock,
)
from rag_blend_frameworks.chat import Turn, render_turns
from rag_blend_frameworks.prompts import Prompt

# What chat templates know; LlamaIndex has a few more names for the same parts.
_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}

_NOT_TEXT = (ImageBlock, AudioBlock, VideoBlock, DocumentBlock)


def render_chat(tokenizer: Any, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> Prompt:
    """Render messages with the tokenizer's own chat template, ready for the assistant's turn.

    LlamaIndex sends what some templates refuse: a `system_prompt` plus the system message of its QA prompt, so two
    turns of one role in a row. See `render_turns`.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        messages: The conversation.
        options: More variables for the template, e.g. `enable_thinking` or `date_string`.

    Returns:
        The rendered prompt.

    Raises:
        ValueError: Empty conversation, a message that is not text, or the template accepts none of the forms.
    """
    turns = [_turn(message) for message in messages]
    if not turns:
        raise ValueError("chat needs at least one message")
    return render_turns(tokenizer, turns, options)


def _turn(message: ChatMessage) -> Turn:
    if any(isinstance(block, _NOT_TEXT) for block in message.blocks):
        raise ValueError("BlendLLM reads text only; a message holds an image, audio, video or document")
    role = _TEMPLATE_ROLES.get(message.role, message.role.value)
    return {"role": role, "content": message.content or ""}
