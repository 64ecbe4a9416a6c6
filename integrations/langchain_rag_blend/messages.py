"""LangChain messages -> the one text that the model reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    get_buffer_string,
)

from langchain_rag_blend.prompts import Prompt

# What chat templates know.
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}

# Content blocks without text of their own that are no loss: a message keeps its tool calls beside the content.
_SILENT_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "reasoning", "thinking"})

Turn = dict[str, Any]
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
    return _rendered(tokenizer, turns, {**(options or {}), "tools": list(tools) or None})


def shows_tools(tokenizer: Any) -> bool:
    """Tell whether the chat template has a place for tools, by rendering one."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    name = "qxjzkvw"
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    function = {"name": name, "description": "x", "parameters": parameters}
    try:
        prompt = _rendered(
            tokenizer, [{"role": "user", "content": "x"}], {"tools": [{"type": "function", "function": function}]}
        )
    except Exception:  # whatever a template makes of tools: it does not show them
        return False
    return name in prompt.text


def _rendered(tokenizer: Any, turns: Sequence[Turn], options: Mapping[str, Any]) -> Prompt:
    """Render turns in the first form in which the template shows all of them.

    Some templates refuse a system role or two turns of one role in a row, others silently drop a system message in
    such a place; agents and chains send both. Turns are therefore tried as they are, then with neighbours of one
    role joined, then with the system text at the top of the first user turn. A template that accepts the turns is
    given exactly what the user wrote.
    """
    refusal: TemplateError | None = None
    accepted: str | None = None
    for form in (turns, _join_neighbours(turns), _fold_system(turns)):
        try:
            text = str(tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=True, **options))
        except TemplateError as error:
            refusal = refusal or error
            continue
        if _shows_all(text, form):
            return Prompt(text, add_special_tokens=False)
        accepted = accepted or text
    if accepted is None:
        raise ValueError(f"the model's chat template rejects this conversation: {refusal}") from refusal
    # No form shows everything: the template itself is made to leave something out (an old turn, say).
    return Prompt(accepted, add_special_tokens=False)


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


def _join_neighbours(turns: Sequence[Turn]) -> list[Turn]:
    """Join neighbouring turns of one role with an empty line; answers of several tools stay apart."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn["role"] != "tool" and joined[-1]["role"] == turn["role"]:
            calls = [*joined[-1].get("tool_calls", ()), *turn.get("tool_calls", ())]
            joined[-1] = {
                **joined[-1],
                "content": _paragraphs(joined[-1]["content"], turn["content"]),
                **({"tool_calls": calls} if calls else {}),
            }
        else:
            joined.append(turn)
    return joined


def _fold_system(turns: Sequence[Turn]) -> list[Turn]:
    """Put all system text at the top of the first user turn (of a new one if there is none)."""
    system = _paragraphs(*(turn["content"] for turn in turns if turn["role"] == "system"))
    rest = _join_neighbours([turn for turn in turns if turn["role"] != "system"])
    if not system:
        return rest
    first = next((i for i, turn in enumerate(rest) if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": system}, *rest]
    rest[first] = {**rest[first], "content": _paragraphs(system, rest[first]["content"])}
    return rest


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _shows_all(rendered: str, turns: Sequence[Turn]) -> bool:
    """Tell whether every system and user text stands in the rendering (templates may strip the ends).

    Assistant turns are not checked: templates of reasoning models cut old thoughts on purpose.
    """
    return all(turn["content"].strip() in rendered for turn in turns if turn["role"] in ("system", "user"))
