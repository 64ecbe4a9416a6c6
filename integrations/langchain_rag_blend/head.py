"""The text in front of the context: chunks are reused only behind the head they were cached with.

A chain's head is found by rendering its prompt template with a stand-in for the context and cutting before it.
Its last token can depend on the first letter of the context (" Be" may be one token), so the prompt is tokenised
with several stand-ins and only the tokens that all of them share are kept (and blanks, see `front_ids`): they are the
first tokens of every prompt that this template makes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable
from rag_blend_frameworks.prompts import STAND_INS, Prompt, front_ids

HeadSource = BasePromptTemplate[Any] | Runnable[Any, Any] | str | Sequence[int]
"""A prompt template, a chain that has one, the very text in front of the context, or its token ids."""


def head_ids(tokenizer: Any, head: Prompt) -> list[int]:
    """Return the token ids with which prompts start that begin with this text, whatever follows.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
        head: The text in front of the context.

    Returns:
        Token ids, special tokens in front included; none if the text is empty.
    """
    if not head.text:
        return []
    return front_ids(tokenizer, head, [head._replace(text=head.text + stand_in) for stand_in in STAND_INS])


def head_of_template(
    template: BasePromptTemplate[Any], variable: str, render: Callable[[PromptValue], Prompt]
) -> Prompt:
    """Return the text in front of the context in the prompts of a template.

    Args:
        template: The template.
        variable: Its variable for the context.
        render: Makes the model's prompt of what the template makes.

    Raises:
        ValueError: The template has no such variable, does not show it, or something that differs from prompt to
            prompt stands in front of it.
    """
    if variable not in template.input_variables:
        raise ValueError(f"the prompt template has no variable {variable!r}, only {sorted(template.input_variables)}")
    heads = set()
    for others in _values_of_other_variables(template, variable):
        for stand_in in STAND_INS[:2]:
            prompt = render(template.format_prompt(**others, **{variable: stand_in}))
            at = prompt.text.find(stand_in)
            if at < 0:
                raise ValueError(f"the prompt template does not show {{{variable}}}, so it has no head")
            heads.add(prompt._replace(text=prompt.text[:at]))
    if len(heads) > 1:
        raise ValueError(
            f"the text in front of {{{variable}}} differs from prompt to prompt, so it has no fixed head: put the "
            "question and the history behind the context, or cache the documents for any head (no prompt=)"
        )
    return heads.pop()


def template_in(source: Runnable[Any, Any], variable: str) -> BasePromptTemplate[Any]:
    """Return the prompt template with this variable: a template itself, or the one in a chain.

    Raises:
        ValueError: There is none.
    """
    if isinstance(source, BasePromptTemplate):
        return source
    for template in source.get_prompts():
        if variable in template.input_variables:
            return template
    raise ValueError(
        f"no prompt template with a variable {variable!r} was found in the {type(source).__name__}; "
        "give the template itself, name its variable, or give the text in front of the context"
    )


def _values_of_other_variables(template: BasePromptTemplate[Any], variable: str) -> Iterator[dict[str, Any]]:
    """Two sets of values that have nothing in common."""
    histories = _history_variables(template)
    turns: tuple[list[BaseMessage], ...] = ([], [HumanMessage("Yqxjzk"), AIMessage("Xqxjzk")])
    for word, history in zip(("Wqxjzk", "vqxjzk"), turns, strict=True):
        names = [name for name in template.input_variables if name != variable]
        yield {name: history if name in histories else word for name in names} | {name: history for name in histories}


def _history_variables(template: BasePromptTemplate[Any]) -> set[str]:
    messages = template.messages if isinstance(template, ChatPromptTemplate) else []
    return {message.variable_name for message in messages if isinstance(message, MessagesPlaceholder)}
