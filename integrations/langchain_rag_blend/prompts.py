"""The one text that the model reads, and its tokens."""

from typing import Any, NamedTuple


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
