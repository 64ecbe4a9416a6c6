"""The text in front of the context: chunks are reused only behind the head they were cached with.

The head is found by rendering the real template with a stand-in for the context and cutting before it. Its
last token can depend on the first letter of the context (" Be" may be one token), so the prompt is tokenised
with several stand-ins and only the tokens that all of them share are kept (and blanks, see `front_ids`): they are the
first tokens of every prompt that this template makes.
"""

from collections.abc import Callable
from typing import Any

from rag_blend_frameworks.prompts import STAND_INS, Prompt, front_ids


def head_ids(tokenizer: Any, render: Callable[[str], Prompt]) -> list[int]:
    """Return the token ids with which prompts start, whatever the context.

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
    return front_ids(tokenizer, prompts[0]._replace(text=prompts[0].text[:cut]), prompts)
