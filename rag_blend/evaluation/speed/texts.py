"""Chunks of one length and questions about them: from one's own texts, or of random words. No two are alike."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.errors import PromptTooLongError
from rag_blend.evaluation.cases import Case, Passage
from rag_blend.evaluation.prompts import adds_special_tokens, prompt_of
from rag_blend.info import context_window_of
from rag_blend.prompt import prompt_ids

_LEAST_WORDS = 20  # of a vocabulary that texts can be made of
_QUESTION_WORDS = 8


class Texts:
    """Hands out chunks and questions, each once, the same for the same arguments.

    Args:
        tokenizer: The model's tokenizer.
        chunk_tokens: Length of a chunk, in tokens; cutting may change it by one or two.
        cases: Their passages, one behind the other, are cut into chunks; their questions are asked. None: both are
            random words of the tokenizer's vocabulary: as good for timing, but what a model says to them means little.
        seed: Of the random words.

    Raises:
        ValueError: A chunk is to be shorter than 16 tokens, or there is nothing to make texts of.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chunk_tokens: int, cases: Sequence[Case] | None = None, seed: int = 0
    ) -> None:
        if chunk_tokens < 16:
            raise ValueError(f"a chunk must have 16 tokens or more to be found in a prompt, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self.source = "random words" if cases is None else ", ".join(sorted({case.dataset for case in cases}))
        self._tokenizer = tokenizer
        if cases is None:
            rng, words = random.Random(seed), _words(tokenizer)
            texts = _made_up(words, chunk_tokens, rng)
            self._questions = _made_up(words, _QUESTION_WORDS, rng)
        else:
            texts = iter(dict.fromkeys(passage.prompt_text for case in cases for passage in case.passages))
            self._questions = iter(dict.fromkeys(case.question for case in cases))
        self._pieces = self._cut(texts)

    def chunks(self, count: int) -> list[str]:
        """The next chunks.

        Raises:
            ValueError: There is not enough text.
        """
        taken = list(islice(self._pieces, count))
        if len(taken) < count:
            raise ValueError(
                f"{self.source}: too little text for so many chunks of {self.chunk_tokens} tokens, each used in one "
                "prompt only; give more --data, or fewer --rounds or --lengths"
            )
        return taken

    def question(self) -> str:
        """The next question.

        Raises:
            ValueError: There are no more.
        """
        question = next(self._questions, None)
        if question is None:
            raise ValueError(f"{self.source}: too few questions; give more --data, or fewer --rounds or --lengths")
        return question

    def prompt(self, chunks: Sequence[str], question: str) -> str:
        """The chunks and the question in the words of the quality bench, chat template included."""
        return prompt_of(self._tokenizer, Case("", "qa", question, (), tuple(Passage(chunk) for chunk in chunks)))

    def _cut(self, texts: Iterator[str]) -> Iterator[str]:
        """Pieces of `chunk_tokens` tokens; what is left at the end is not one."""
        waiting: list[int] = []
        for text in texts:
            waiting += self._tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
            while len(waiting) >= self.chunk_tokens:
                piece, waiting = waiting[: self.chunk_tokens], waiting[self.chunk_tokens :]
                yield str(self._tokenizer.decode(piece)).strip()


def require_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> None:
    """Refuse prompts of which the longest text does not fit the context window, before anything is computed for them.

    Raises:
        PromptTooLongError: It does not; both lengths are in the text.
    """
    num_tokens = len(prompt_ids(tokenizer, max(prompts, key=len, default=""), adds_special_tokens(tokenizer)))
    window = context_window_of(model.config, tokenizer)
    if num_tokens >= window:
        raise PromptTooLongError(
            f"a prompt takes {num_tokens} tokens, but the model's context window is {window}; use smaller --lengths"
        )


def _made_up(words: Sequence[str], length: int, rng: random.Random) -> Iterator[str]:
    while True:
        yield " ".join(rng.choices(words, k=length))


def _words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Words that are one token behind a blank; in a vocabulary that does not tell, whatever is written in letters."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    texts = dict.fromkeys(tokenizer.batch_decode([[i] for i in ids]))
    letters = [text for text in texts if text.isascii() and text.strip().isalpha()]
    words = [text.strip() for text in letters if text.startswith(" ")] or letters
    if len(words) < _LEAST_WORDS:
        raise ValueError("the tokenizer's vocabulary has too few words to make texts of; give --data")
    return words
