"""LangChain messages -> the one text that the model reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    get_buffer_string,
)
from rag_blend_frameworks.chat import Turn, render_turns
from rag_blend_frameworks.prompts import Prompt

# What chat templates know.
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}

# Content blocks without text of their own that are no loss: a message keeps its tool calls beside the content.
_SILENT_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "reasoning", "thinking"})

Tool = dict[str, Any]


def render(
    tokenizer: Any,
    messages: Sequence[BaseMessage],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render a conversation, ready for the assistant's turn, with the tokenizer's chat template if it has one.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
        messages: The conversation.
        tools: Tools in OpenAI's format.
        options: More variables for the template, e.g. `enable_thinking` or `date_string`.

    Returns:
        The rendered prompt. Without a template, the plain dialogue that LangChain writes for text models, begun
        for the assistant.

    Raises:
        ValueError: Empty conversation, a message that is not text, or the template accepts none of the forms.
    """
    if not messages:
        raise ValueError("a chat model needs at least one message")
    turns = [_turn(message) for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        plain = [message.model_copy(update={"content": _text(message)}) for message in messages]
        return Prompt(get_buffer_string(plain) + "\nAI:")
    # Answers of several tools belong to different calls.
    return render_turns(tokenizer, turns, {**(options or {}), "tools": list(tools) or None}, apart={"tool"})


def shows_tools(tokenizer: Any) -> bool:
    """Tell whether the chat template has a place for tools, by rendering one."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    name = "qxjzkvw"
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    function = {"name": name, "description": "x", "parameters": parameters}
    try:
        prompt = render_turns(
            tokenizer, [{"role": "user", "content": "x"}], {"tools": [{"type": "function", "function": function}]}
        )
    except Exception:  # whatever a template makes of tools: it does not show them
        return False
    return name in prompt.text


def _turn(message: BaseMessage) -> Turn:
    turn: Turn = {"role": _role(message), "content": _text(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, FunctionMessage):
        return "tool"
    kind = message.type.removesuffix("MessageChunk").lower()  # a chunk of a message is a message
    if kind not in _ROLES:
        raise ValueError(f"a chat model cannot read a {type(message).__name__}")
    return _ROLES[kind]


def _text(message: BaseMessage) -> str:
    """The text of a message.

    Raises:
        ValueError: It holds something else, such as an image.
    """
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text":
            parts.append(str(block.get("text", "")))
        elif block.get("type") == "json":
            parts.append(json.dumps(block.get("json"), ensure_ascii=False))
        elif block.get("type") not in _SILENT_BLOCKS:
            raise ValueError(f"the model reads text only; a message holds a block of type {block.get('type')!r}")
    return "".join(parts)
