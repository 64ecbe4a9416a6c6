"""Chat messages -> the one text that the model reads."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    VideoBlock,
)

# What chat templates know; LlamaIndex has a few more names for the same parts.
_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}

_NOT_TEXT = (ImageBlock, AudioBlock, VideoBlock, DocumentBlock)

Turn = dict[str, str]


class Prompt(NamedTuple):
    """A text for the engine, and whether the tokenizer may put its special tokens around it."""

    text: str
    add_special_tokens: bool | None = None
    """False after a chat template (it wrote the BOS itself); None: unless the text starts with BOS."""


def render_chat(tokenizer: Any, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> Prompt:
    """Render messages with the tokenizer's own chat template, ready for the assistant's turn.

    Some templates refuse a system role or two turns of one role in a row, others silently drop a system
    message in such a place. LlamaIndex sends both (a `system_prompt` plus the system message of its QA
    prompt). Messages are therefore tried as they are, then with neighbours of one role joined, then with
    the system text at the top of the first user message. The first rendering that shows every system and
    user text wins, so a template that accepts the messages is given exactly what the user wrote.

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


def _turn(message: ChatMessage) -> Turn:
    if any(isinstance(block, _NOT_TEXT) for block in message.blocks):
        raise ValueError("BlendLLM reads text only; a message holds an image, audio, video or document")
    role = _TEMPLATE_ROLES.get(message.role, message.role.value)
    return {"role": role, "content": message.content or ""}


def _join_neighbours(turns: Sequence[Turn]) -> list[Turn]:
    """Join neighbouring turns of one role with an empty line."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            joined[-1] = {**turn, "content": _paragraphs(joined[-1]["content"], turn["content"])}
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
    rest[first] = {"role": "user", "content": _paragraphs(system, rest[first]["content"])}
    return rest


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _shows_all(rendered: str, turns: Sequence[Turn]) -> bool:
    """Tell whether every system and user text stands in the rendering (templates may strip the ends).

    Assistant turns are not checked: templates of reasoning models cut old thoughts on purpose.
    """
    return all(turn["content"].strip() in rendered for turn in turns if turn["role"] in ("system", "user"))
