"""The text in front of the context: chunks are reused only behind the head they were cached with.

The head is found by rendering the real template with a stand-in for the context and cutting before it. Its
last token can depend on the first letter of the context (" Be" may be one token), so the prompt is tokenised
with several stand-ins and only the tokens that all of them share are kept: they are the first tokens of every
prompt that this template makes.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.llms.rag_blend.messages import Prompt

# They differ in the first character: capital, small letter, digit, bracket, dash, accent, ideograph.
STAND_INS = tuple(first + "qxjzkvw" for first in ("Z", "z", "7", "(", "-", "\u00e9", "\u4e2d"))


def head_ids(tokenizer: Any, render: Callable[[str], Prompt]) -> list[int]:
    """Return the token ids with which every prompt starts, whatever the context.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
        render: Makes the prompt for a context text.

    Returns:
        Token ids, special tokens in front included.

    Raises:
        ValueError: The rendered prompt does not hold the context.
    """
    prompts = [render(stand_in) for stand_in in STAND_INS]
    positions = {prompt.text.find(stand_in) for prompt, stand_in in zip(prompts, STAND_INS, strict=True)}
    if -1 in positions:
        raise ValueError("the prompt template does not show the context ({context_str}), so it has no head")
    if len(positions) > 1:
        raise ValueError("the text in front of the context changes with the context, so it has no fixed head")
    cut = positions.pop()
    head = prompts[0]._replace(text=prompts[0].text[:cut])
    # The cut text bounds the result where a tokenizer maps all stand-ins to one unknown token.
    return _common_prefix([token_ids(tokenizer, prompt) for prompt in (head, *prompts)])


def says_today(tokenizer: Any, head: Sequence[int]) -> bool:
    """Tell whether the chat template wrote today's date into the head, as Llama 3.2's does."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return "strftime_now" in template and str(datetime.date.today().year) in tokenizer.decode(head)


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokenise a prompt as the engine does."""
    special = prompt.add_special_tokens
    if special is None:
        bos = getattr(tokenizer, "bos_token", None)
        special = not (bos and prompt.text.startswith(bos))
    return [int(token) for token in tokenizer(prompt.text, add_special_tokens=special)["input_ids"]]


def _common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    shared: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared
