"""A conversation -> the one text that the model reads, by the tokenizer's chat template."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rag_blend_frameworks.prompts import Prompt

Turn = dict[str, Any]


def render_turns(
    tokenizer: Any, turns: Sequence[Turn], options: Mapping[str, Any], apart: Collection[str] = ()
) -> Prompt:
    """Render turns in the first form in which the template shows all of them.

    Some templates refuse a system role or two turns of one role in a row, others silently drop a system message in
    such a place; agents and chains send both. Turns are therefore tried as they are, then with neighbours of one
    role joined, then with the system text at the top of the first user turn. A template that accepts the turns is
    given exactly what the user wrote.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        turns: The conversation, each turn with at least `role` and `content`.
        options: More variables for the template.
        apart: Roles whose neighbours are never joined.

    Raises:
        ValueError: The template accepts none of the forms.
    """
    refusal: TemplateError | None = None
    accepted: str | None = None
    for form in (turns, _join_neighbours(turns, apart), _fold_system(turns, apart)):
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


def _join_neighbours(turns: Sequence[Turn], apart: Collection[str]) -> list[Turn]:
    """Join neighbouring turns of one role with an empty line."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn["role"] not in apart and joined[-1]["role"] == turn["role"]:
            calls = [*joined[-1].get("tool_calls", ()), *turn.get("tool_calls", ())]
            joined[-1] = {
                **joined[-1],
                "content": _paragraphs(joined[-1]["content"], turn["content"]),
                **({"tool_calls": calls} if calls else {}),
            }
        else:
            joined.append(turn)
    return joined


def _fold_system(turns: Sequence[Turn], apart: Collection[str]) -> list[Turn]:
    """Put all system text at the top of the first user turn (of a new one if there is none)."""
    system = _paragraphs(*(turn["content"] for turn in turns if turn["role"] == "system"))
    rest = _join_neighbours([turn for turn in turns if turn["role"] != "system"], apart)
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
