"""Cases made from other cases, or made up: what reuse may break although the usual questions do not show it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from rag_blend.evaluation.cases import Case, Passage

COPIED_WORDS = 40
_OPENING_WORDS = 6
_MIN_WORDS = 20  # a shorter passage is no test of copying
_RECORDS = 8  # of one lookup passage


def unanswerable(case: Case) -> Case:
    """The case without its supporting passages: the right answer is that the answer is not there.

    Raises:
        ValueError: No passage is marked as supporting, or no other is left.
    """
    others = tuple(passage for passage in case.passages if not passage.supporting)
    if len(others) == len(case.passages):
        raise ValueError(f"case {case.id!r} marks no passage as supporting")
    if not others:
        raise ValueError(f"case {case.id!r} has supporting passages only")
    return replace(case, task="unanswerable", answers=(), passages=others, answerable=False)


def copy_cases(passages: Sequence[Passage], n: int, seed: int = 0, num_passages: int = 8) -> list[Case]:
    """Cases that ask for the beginning of one passage, word for word.

    Args:
        passages: The collection; each case takes its passages from it.
        n: How many cases; fewer when the collection has fewer passages of at least 20 words.
        seed: Of the choice and the order.
        num_passages: Passages per case.

    Returns:
        Cases whose answer is the passage's first 40 words, single spaces between them, with its title in front as a
        second one. The passage is named by its title where no other passage of the case has the same one, else by its
        first six words.

    Raises:
        ValueError: No passage is long enough.
    """
    rng = random.Random(seed)
    collection = list({passage.prompt_text: replace(passage, supporting=False) for passage in passages}.values())
    targets = [passage for passage in collection if len(passage.text.split()) >= _MIN_WORDS]
    if not targets:
        raise ValueError(f"no passage has {_MIN_WORDS} words, so there is nothing to copy")
    cases = []
    for number, target in enumerate(rng.sample(targets, min(n, len(targets))), 1):
        others = [passage for passage in collection if passage is not target and not _opens_alike(passage, target)]
        around = rng.sample(others, min(num_passages - 1, len(others)))
        around.insert(rng.randint(0, len(around)), replace(target, supporting=True))
        wanted = " ".join(target.text.split()[:COPIED_WORDS])
        # Models like to begin with the title, whatever they are asked.
        answers = (wanted, f"{target.title}\n{wanted}") if target.title else (wanted,)
        cases.append(Case(f"copy-{number}", "copy", _copy_question(target, around), answers, tuple(around)))
    return cases


def lookup_cases(n: int, num_passages: int = 8, seed: int = 0) -> list[Case]:
    """Cases that ask for one record among many whose keys differ in one digit: nothing but exact reading helps.

    Args:
        n: How many cases.
        num_passages: Passages per case, each of eight records.
        seed: Of keys, codes and order.

    Returns:
        Cases whose answer is a five-digit code. The records with the most similar keys stand in different passages.
    """
    rng = random.Random(seed)
    return [_lookup_case(rng, number, num_passages) for number in range(1, n + 1)]


def _opens_alike(left: Passage, right: Passage) -> bool:
    return left.text.split()[:_OPENING_WORDS] == right.text.split()[:_OPENING_WORDS]


def _copy_question(target: Passage, around: Sequence[Passage]) -> str:
    if target.title and sum(passage.title == target.title for passage in around) == 1:
        return f'Repeat word for word the passage titled "{target.title}", without its title.'
    opening = " ".join(target.text.split()[:_OPENING_WORDS])
    return f'Repeat word for word the passage that begins with "{opening}".'


def _lookup_case(rng: random.Random, number: int, num_passages: int) -> Case:
    keys = _similar_keys(rng, num_passages * _RECORDS)
    codes = rng.sample(range(10_000, 100_000), len(keys))
    records = dict(zip(keys, codes, strict=True))
    wanted = rng.choice(keys)
    passages = []
    for at in range(num_passages):
        # Neighbours in `keys` are the most similar ones: dealt out like cards, they come into different passages.
        own = keys[at::num_passages]
        rng.shuffle(own)
        text = " ".join(f"The access code of warehouse {key} is {records[key]}." for key in own)
        passages.append(Passage(text, f"Register {at + 1}", wanted in own))
    question = f"What is the access code of warehouse {wanted}?"
    return Case(f"lookup-{number}", "lookup", question, (str(records[wanted]),), tuple(passages))


def _similar_keys(rng: random.Random, count: int) -> list[str]:
    """Distinct keys in runs of up to eight that differ in one digit from the run's first."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        first = [str(rng.randint(0, 9)) for _ in range(4)]
        run = ["".join(first)]
        for _ in range(7):
            digits = list(first)
            digits[rng.randrange(4)] = str(rng.randint(0, 9))
            run.append("".join(digits))
        keys.update(dict.fromkeys(f"K-{digits}" for digits in run))
    return list(keys)[:count]
