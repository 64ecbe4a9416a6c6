"""How good an answer is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

# Said anywhere in an answer, these mean that it gives none.
ABSTENTIONS = (
    "not mentioned", "not provided", "not specified", "not stated", "not given", "not found", "not available",
    "not included", "not contained", "not in the context", "not in the provided", "not enough information",
    "no information", "no mention", "no answer", "cannot be determined", "cannot be answered", "cannot determine",
    "cannot answer", "cannot find", "unable to determine", "unable to answer", "unanswerable", "i do not know",
    "does not mention", "does not provide", "does not specify", "does not state", "does not say", "does not contain",
    "does not include", "does not give", "do not mention", "do not provide", "do not contain", "not explicitly",
)  # fmt: skip
# These mean it only when the answer is nothing else: "Unknown Pleasures" is a record, "None" a name in many languages.
BARE_ABSTENTIONS = ("unknown", "none", "n/a", "na", "unclear", "not known", "unspecified")
_CONTRACTIONS = {"can't": "cannot", "can not": "cannot", "n't": " not"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case without punctuation, articles and surplus space, as SQuAD's evaluation does (arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Overlap of normalised words with the best of the answers, 0 to 1 (SQuAD's F1).

    Raises:
        ValueError: There are no answers.
    """
    _require(answers)
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers)


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the prediction is one of the answers, both normalised.

    Raises:
        ValueError: There are no answers.
    """
    _require(answers)
    return normalise(prediction) in {normalise(answer) for answer in answers}


def abstains(text: str) -> bool:
    """Whether an answer says that there is none: `ABSTENTIONS` anywhere, `BARE_ABSTENTIONS` alone, or nothing at all.

    A list of phrases, so it errs in both directions on free text; the prompts ask for "not mentioned".
    """
    plain = " ".join(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split())
    for short, long in _CONTRACTIONS.items():
        plain = plain.replace(short, long)
    return plain.strip(" .!\"'") in {"", *BARE_ABSTENTIONS} or any(phrase in plain for phrase in ABSTENTIONS)


def verbatim_accuracy(prediction: str, wanted: str) -> float:
    """Share of the wanted words with which the prediction begins, in order and up to the first difference, 0 to 1.

    Words are what whitespace separates; quotation marks at their ends do not count.

    Raises:
        ValueError: `wanted` has no words.
    """
    words = wanted.split()
    if not words:
        raise ValueError("nothing is wanted")
    run = 0
    for said, word in zip(prediction.split(), words, strict=False):
        if said.strip("\"'") != word.strip("\"'"):
            break
        run += 1
    return run / len(words)


def _f1(predicted: list[str], wanted: list[str]) -> float:
    if not predicted or not wanted:
        return float(predicted == wanted)
    common = sum((Counter(predicted) & Counter(wanted)).values())
    # 2PR / (P + R), with P = common / predicted and R = common / wanted
    return 2 * common / (len(predicted) + len(wanted))


def _require(answers: Sequence[str]) -> None:
    if not answers:
        raise ValueError("there are no answers to compare with")
