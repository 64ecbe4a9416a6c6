"""The prompts that all peers get, made of text no part of which stands in two of them.

    python examples/benchmarks/peers/prompts.py --rounds 3 --out prompts.jsonl

Four cases, each with what happened before:

- cold: nothing.
- repeat: its texts were prepared and the same prompt was asked.
- prefix: its texts were prepared and another question about the same texts in the same order was asked.
- reordered: the same, but the texts stood in another order.

A head and every chunk end with a line break, so that their tokens are the same wherever they stand.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, get_args

from transformers import AutoTokenizer

from rag_blend.demo import demo_model_dir
from rag_blend.evaluation.cases import load_cases

Case = Literal["cold", "repeat", "prefix", "reordered"]
CASES: tuple[Case, ...] = get_args(Case)
CHUNK_TOKENS = 512
HEAD_TOKENS = 128  # a whole number of the blocks in which some peers cache, the chunks as well: their best case
TOPIC_WORDS = 8
WARM_UP = 0  # the round that is not measured
WARM_UP_CASES: tuple[Case, ...] = ("cold", "reordered")


@dataclass(frozen=True)
class Prompt:
    """One prompt and what comes before it.

    Attributes:
        case: See the module.
        length: Tokens of all its chunks.
        round: 0 for warming up, then counted from 1.
        text: The prompt that is measured.
        head: What it begins with.
        chunks: What may be prepared, in the order of `earlier`.
        earlier: The prompt that is asked before; "" when cold, and then nothing is prepared either.
    """

    case: Case
    length: int
    round: int
    text: str
    head: str
    chunks: tuple[str, ...]
    earlier: str


class Texts:
    """Running text that is cut into pieces of exact lengths and used up.

    Args:
        paragraphs: The text; of equal ones the first is taken.
        tokenizer: Of the model.
        seed: Of the order of paragraphs.
    """

    def __init__(self, paragraphs: Sequence[str], tokenizer: Any, seed: int) -> None:
        distinct = list(dict.fromkeys(" ".join(paragraph.split()) for paragraph in paragraphs))
        random.Random(seed).shuffle(distinct)
        self._words = " ".join(distinct).split()
        self._count = cache(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))

    def take(self, num_tokens: int, opening: str = "") -> str:
        """The next piece: `opening`, as many words as fit and a line break, `num_tokens` in all.

        Raises:
            ValueError: Not enough text is left.
        """
        while True:
            words = self._fitting(num_tokens, opening)
            piece = " ".join(filter(None, (opening, *words))) + "\n"
            if words and self._count(piece) == num_tokens:
                del self._words[: len(words)]
                return piece
            del self._words[:1]  # the last word would have had too many tokens; it will not after another first one

    def _fitting(self, num_tokens: int, opening: str) -> list[str]:
        free = num_tokens - 1 - self._count(opening)
        for at, word in enumerate(self._words):
            if free <= 0:
                return self._words[:at]
            free -= self._count(f" {word}")
        raise ValueError("there is not enough text for so many prompts: name more with --data, or ask for fewer rounds")


def make_prompts(texts: Texts, lengths: Sequence[int], rounds: int, seed: int = 0) -> list[Prompt]:
    """Prompts of all cases, lengths and rounds, and in front of them those for warming up.

    Raises:
        ValueError: A length is too short, or there is not enough text.
    """
    if wrong := [length for length in lengths if length < 2 * CHUNK_TOKENS or length % CHUNK_TOKENS]:
        raise ValueError(f"lengths are whole numbers of {CHUNK_TOKENS} tokens, at least two, not {wrong[0]}")
    rng = random.Random(seed)
    wanted = [
        (case, length, turn)
        for turn in range(rounds + 1)
        for length in lengths
        for case in (CASES if turn != WARM_UP else WARM_UP_CASES)
    ]
    numbers = rng.sample(range(100_000, 1_000_000), len(wanted))
    return [make_prompt(*key, number, texts) for key, number in zip(wanted, numbers, strict=True)]


def make_prompt(case: Case, length: int, turn: int, number: int, texts: Texts) -> Prompt:
    """A prompt of texts that no other one has, and a head that begins with a number of its own.

    Raises:
        ValueError: There is not enough text.
    """
    opening = f"{number} is the number of this session. Answer the question from the texts that follow. To begin with:"
    head = texts.take(HEAD_TOKENS, opening)
    chunks = tuple(texts.take(CHUNK_TOKENS) for _ in range(length // CHUNK_TOKENS))
    asked, other = (head + "".join(chunks) + _question(chunk) for chunk in (chunks[0], chunks[-1]))
    reordered = head + "".join(reversed(chunks)) + _question(chunks[-1])
    text, earlier = {
        "cold": (asked, ""),
        "repeat": (asked, asked),
        "prefix": (other, asked),
        "reordered": (reordered, asked),
    }[case]
    return Prompt(case, length, turn, text, head, chunks, earlier)


def _question(chunk: str) -> str:
    words = chunk.split()
    middle = len(words) // 2
    return f'\nQuestion: What is said about "{" ".join(words[middle : middle + TOPIC_WORDS])}"?\nAnswer:'


def paragraphs_of(data: Sequence[Path]) -> list[str]:
    """Passages of JSON lines files, as `rag-blend bench quality` reads them; without any, Python's own manual.

    Raises:
        RagBlendError: A file is not of that format.
        OSError: A file cannot be read.
    """
    if data:
        return [passage.text for path in data for case in load_cases(path) for passage in case.passages]
    return [paragraph for text in topics.values() for paragraph in text.split("\n\n")]


def lines_of(prompts: Sequence[Prompt]) -> Iterator[str]:
    """One JSON object a prompt."""
    return (json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides which prompts are made."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048], help="tokens of the chunks of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each case and length")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="JSON lines of questions and passages")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which text is used")


def prompts_for(args: argparse.Namespace, model: str) -> list[Prompt]:
    """The prompts that arguments ask for, cut with the tokenizer of a Hugging Face directory."""
    texts = Texts(paragraphs_of(args.data), AutoTokenizer.from_pretrained(model), args.seed)
    return make_prompts(texts, args.lengths, args.rounds, args.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(lines_of(prompts_for(args, str(demo_model_dir()))))


if __name__ == "__main__":
    main()
