"""The one text that the model reads, its tokens, and the head that all prompts of a template share.

A head is found by rendering a template with a stand-in for the context and cutting before it. Its last token can depend
on the first letter of the context (" Be" may be one token), so the prompt is tokenised with several stand-ins, and only
the tokens that all of them share are kept; and blanks at the end that are the same tokens in front of all letters.
"""

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

_EDGE_TOKENS = 3  # with so many tokens of a head changed, chunks cached behind it are still reused
# They differ in the first character: capital, small letter, digit, bracket, dash, accent, ideograph.
STAND_INS = tuple(first + "qxjzkvw" for first in ("Z", "z", "7", "(", "-", "\u00e9", "\u4e2d"))


class Prompt(NamedTuple):
    """A text for the engine, and whether the tokenizer may put its special tokens around it."""

    text: str
    add_special_tokens: bool | None = None
    """False after a chat template (it wrote the BOS itself); None: unless the text starts with BOS."""


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokenise a prompt as the engine does."""
    special = prompt.add_special_tokens
    if special is None:
        bos = getattr(tokenizer, "bos_token", None)
        special = not (bos and prompt.text.startswith(bos))
    return [int(token) for token in tokenizer(prompt.text, add_special_tokens=special)["input_ids"]]


def shared_ids(tokenizer: Any, prompts: Sequence[Prompt]) -> list[int]:
    """The token ids with which all of these prompts start."""
    shared: list[int] = []
    for column in zip(*(token_ids(tokenizer, prompt) for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


def front_ids(tokenizer: Any, head: Prompt, followed: Sequence[Prompt]) -> list[int]:
    """The token ids of a head in front of most contexts.

    Args:
        tokenizer: The model's tokenizer.
        head: It alone; it bounds the result where a tokenizer maps all stand-ins to one unknown token.
        followed: It in front of each of `STAND_INS`.
    """
    shared, letters = shared_ids(tokenizer, [head, *followed]), shared_ids(tokenizer, followed[:2])
    edge = letters[len(shared) :]
    # By GPT-2's rule two line breaks are one token at the end of a text, and in front of digits where those are split.
    is_blank = 0 < len(edge) <= _EDGE_TOKENS and not tokenizer.decode(edge).strip()
    return letters if is_blank else shared


def says_today(tokenizer: Any, head: Sequence[int]) -> bool:
    """Tell whether the chat template wrote today's date into the head, as Llama 3.2's does."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return "strftime_now" in template and str(datetime.date.today().year) in tokenizer.decode(head)
