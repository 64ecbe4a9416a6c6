"""What clients ask, round by round, made of text no part of which stands in two sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from prompts import CHUNK_TOKENS, HEAD_TOKENS, WARM_UP, Prompt, Texts, make_prompt, paragraphs_of

Case = Literal["cold", "new", "repeat", "reordered"]
CASES: tuple[Case, ...] = get_args(Case)
WARM_UP_CASES: tuple[Case, ...] = ("new", "repeat", "reordered")
_PARAGRAPH_WORDS = 100
_SPARE = 1.5  # pieces have exact lengths: some words are passed over
_LONGEST_WORD = 12  # letters: fewer than the tokens by which a stored chunk is found


class Load(NamedTuple):
    """So many clients at once, each with prompts of so many tokens of chunks, in so many rounds."""

    clients: int
    length: int
    rounds: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read ``CLIENTSxTOKENSxROUNDS``, such as ``8x2048x5``.

        Raises:
            ValueError: It is not that.
        """
        try:
            load = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise ValueError(f"a load is CLIENTSxTOKENSxROUNDS, such as 8x2048x5, not {text!r}") from None
        if min(load) < 1 or load.length < 2 * CHUNK_TOKENS or load.length % CHUNK_TOKENS:
            raise ValueError(
                f"a load has a client, a round, and a whole number of chunks of {CHUNK_TOKENS} tokens, two at least; "
                f"not {text!r}"
            )
        return load


@dataclass(frozen=True)
class Session:
    """What one client asks in one round.

    Attributes:
        unknown: A prompt whose chunks nobody has met.
        known: A prompt whose chunks are ingested, and those chunks in another order.
    """

    unknown: Prompt
    known: Prompt

    def prompt(self, case: Case) -> str:
        """The prompt of a case."""
        return {
            "cold": self.unknown.text,
            "new": self.known.earlier,
            "repeat": self.known.earlier,
            "reordered": self.known.text,
        }[case]


@dataclass(frozen=True)
class Round:
    """One round of a load, with a session for each client; `WARM_UP` is its number when it is not counted."""

    load: Load
    number: int
    sessions: tuple[Session, ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is asked, in this order: a prompt comes before itself again and before its chunks in another order."""
        return WARM_UP_CASES if self.number == WARM_UP else CASES


def make_rounds(loads: Sequence[Load], texts: Texts, seed: int = 0) -> list[Round]:
    """The rounds of all loads, one of each in turn; in front of them one client with each length to warm up.

    Raises:
        ValueError: There is not enough text.
    """
    planned = [(Load(1, length, 1), WARM_UP) for length in sorted({load.length for load in loads})]
    most = max(load.rounds for load in loads)
    planned += [(load, number) for number in range(1, most + 1) for load in loads if number <= load.rounds]
    count = 2 * sum(load.clients for load, _ in planned)
    numbers = iter(random.Random(seed).sample(range(100_000, 1_000_000), count))

    def session(length: int, number: int) -> Session:
        unknown = make_prompt("cold", length, number, next(numbers), texts)
        return Session(unknown, make_prompt("reordered", length, number, next(numbers), texts))

    return [
        Round(load, number, tuple(session(load.length, number) for _ in range(load.clients)))
        for load, number in planned
    ]


def texts_for(loads: Sequence[Load], tokenizer: Any, data: Sequence[Path], seed: int = 0) -> Texts:
    """Passages of JSON lines files; without any, words of Python's manual in random order, as many as are needed.

    Raises:
        RagBlendError: A file is not of that format.
        OSError: A file cannot be read.
    """
    paragraphs = paragraphs_of(data)
    if not data:
        words = sorted({word for paragraph in paragraphs for word in paragraph.split() if _is_usual(word)})
        sessions = [(load.length, load.clients * (load.rounds + 1)) for load in loads]  # a warm-up round has less
        tokens = sum(2 * (length + HEAD_TOKENS) * count for length, count in sessions)
        rng, needed = random.Random(seed), int(_SPARE * tokens / _PARAGRAPH_WORDS)
        paragraphs = [" ".join(rng.choices(words, k=_PARAGRAPH_WORDS)) for _ in range(needed)]
    return Texts(paragraphs, tokenizer, seed)


def _is_usual(word: str) -> bool:
    return word.isalpha() and len(word) <= _LONGEST_WORD
