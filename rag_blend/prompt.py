"""From a prompt to token ids, exactly as plain transformers would do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

EDGE_TOKENS = 3  # so many tokens may change where two texts meet
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


def ids_in_front(tokenizer: PreTrainedTokenizerBase, head: str | Sequence[int]) -> np.ndarray:
    """Token ids with which a prompt begins that begins with a head, int32.

    A line break or blank at its end may be other tokens in front of a letter than at the end of a text: by GPT-2's rule
    two line breaks are one token there and two here.

    Args:
        tokenizer: The model's tokenizer.
        head: Text, or ids, which are taken as they are.

    Raises:
        ValueError: See `prompt_ids`.
    """
    ids = prompt_ids(tokenizer, head)
    if not isinstance(head, str):
        return ids
    first, second = (prompt_ids(tokenizer, head + text) for text in ("Zqxjzkvw", "zqxjzkvw"))
    followed = first[: common_prefix(first, second)]
    edge = followed[common_prefix(ids, followed) :]
    is_blank = 0 < len(edge) <= EDGE_TOKENS and not str(tokenizer.decode(edge.tolist())).strip()
    return followed if is_blank else ids


def head_ids(
    tokenizer: PreTrainedTokenizerBase, head: str | Sequence[int] | None, vocab_size: int
) -> np.ndarray | None:
    """Token ids of what will stand in front of the first chunk; None if nobody knows what will.

    Raises:
        ValueError: See `prompt_ids`; or the model does not know one of them.
    """
    if head is None:
        return None
    ids = ids_in_front(tokenizer, head)
    if ids.max() >= vocab_size:
        raise ValueError(f"the head's token id {ids.max()} is outside the model's vocabulary")
    return ids


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many ids two sequences have in common at their start."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


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
