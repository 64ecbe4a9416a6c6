"""The text of a prompt, token by token, as it reads: a character that several tokens spell stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what a character becomes of which not all bytes are there
_LONGEST = 12  # tokens: no character has as many, so what is not complete by then never will be
_EXCERPT_TOKENS = 40  # nearly always a line


class Piece(NamedTuple):
    """Tokens `start` to `end` (exclusive), mostly one, and the text they add to what is in front of them."""

    start: int
    end: int
    text: str


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | np.ndarray) -> list[Piece]:
    """Cut the text of token ids into the shortest pieces that consist of whole characters and whole tokens.

    Each is decoded behind the piece in front of it, since some tokenizers drop the space that begins a text.
    """
    ids = [int(token) for token in token_ids]
    pieces: list[Piece] = []
    context, start = 0, 0
    before = ""
    for end in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[context:end])
        whole = len(text) > len(before) and not text.endswith(_REPLACEMENT)
        if whole or end - start == _LONGEST or end == len(ids):
            pieces.append(Piece(start, end, text[len(before) :]))
            context, start = start if whole else end, end
            before = _decode(tokenizer, ids[context:end])
    return pieces


def excerpt_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | np.ndarray, length: int = 90) -> str:
    """How the text of token ids begins, on one line of at most so many characters; not escaped."""
    text = " ".join("".join(piece.text for piece in pieces_of(tokenizer, token_ids[:_EXCERPT_TOKENS])).split())
    return text if len(text) <= length and len(token_ids) <= _EXCERPT_TOKENS else text[:length].rstrip() + " …"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
