"""From a prompt to token ids, exactly as plain transformers would do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

_MAX_ID = 2**31 - 1


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], add_special_tokens: bool | None = None
) -> np.ndarray:
    """Token ids of a whole prompt, int32.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Text, or ids, which are taken as they are.
        add_special_tokens: Whether the tokenizer adds its own (BOS). None: yes, unless the text already begins with
            the BOS token, as the output of most chat templates does. Pass False for anything that a chat template
            has rendered: that is what ``tokenizer.apply_chat_template(tokenize=True)`` does.

    Raises:
        ValueError: There are no tokens, or something else than tokens.
        TypeError: There is no prompt.
    """
    if prompt is None:
        raise TypeError("the prompt must be text or a list of token ids, not None")
    if isinstance(prompt, str):
        if add_special_tokens is None:
            bos = tokenizer.bos_token
            add_special_tokens = not (bos and prompt.startswith(bos))
        ids = np.asarray(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])
    else:
        ids = np.asarray(prompt)
    if ids.ndim != 1 or not len(ids):
        raise ValueError("the prompt has no tokens; pass some text or a flat list of token ids")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > _MAX_ID:
        raise ValueError("the prompt is neither text nor a flat list of token ids")
    return ids.astype(np.int32)


def head_ids(
    tokenizer: PreTrainedTokenizerBase, head: str | Sequence[int] | None, vocab_size: int
) -> np.ndarray | None:
    """Token ids of what will stand in front of the first chunk; None if nobody knows what will.

    Raises:
        ValueError: See `prompt_ids`; or the model does not know one of them.
    """
    if head is None:
        return None
    ids = prompt_ids(tokenizer, head)
    if ids.max() >= vocab_size:
        raise ValueError(f"the head's token id {ids.max()} is outside the model's vocabulary")
    return ids


def bos_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids that the tokenizer puts in front of a text by itself: one BOS, or nothing."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    starts = [i for i in ids[:1] if i == tokenizer.bos_token_id]
    return np.asarray(starts, dtype=np.int32)


def chunk_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of texts that will stand somewhere inside a prompt, without special tokens and outer whitespace.

    LlamaIndex strips node texts, LangChain does not: stripped, a chunk is found in the prompts of both.
    """
    if not texts:
        return []
    encoded = tokenizer([text.strip() for text in texts], add_special_tokens=False)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def chunk_separator(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids that LlamaIndex and LangChain put between two chunks, a blank line; none if the tokenizer drops it."""
    return np.asarray(tokenizer("\n\n", add_special_tokens=False)["input_ids"], dtype=np.int32)
