"""Cases from one's own texts, for those who have no file of questions."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rag_blend.evaluation.cases import DEFAULT_PASSAGES, Case, Passage

CHUNK_WORDS = 300
_ENDINGS = (".txt", ".md")
_TITLE_WORDS = 12  # a longer first line is no title
_OPENING_WORDS = 8


def chunks_of(directory: str | os.PathLike[str], max_words: int = CHUNK_WORDS) -> list[str]:
    """Cut the ``.txt`` and ``.md`` files of a directory, at any depth, into chunks.

    Args:
        directory: The directory.
        max_words: Paragraphs (what blank lines separate) are put together up to so many words; a longer one is cut.

    Raises:
        OSError: A file cannot be read.
        ValueError: One is not UTF-8, or there is no text.
    """
    root = Path(directory)
    if not root.is_dir():
        raise NotADirectoryError(f"there is no directory {str(root)!r}")
    chunks: list[str] = []
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file()):
        try:
            chunks += _cut(path.read_text("utf-8"), max_words)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8, or move it elsewhere") from error
    if not chunks:
        raise ValueError(f"{root}: no text in {' or '.join(_ENDINGS)} files")
    return chunks


def cases_from_chunks(texts: Sequence[str], n: int, num_passages: int = DEFAULT_PASSAGES, seed: int = 0) -> list[Case]:
    """Cases that ask what the texts say about one chunk's title, or first words. They have no accepted answers.

    Args:
        texts: The chunks.
        n: How many cases; fewer when there are fewer different chunks.
        num_passages: Passages per case: the chunk, and those that share most words with it, as a retriever would
            bring them; in random order.
        seed: Of choice and order.

    Raises:
        ValueError: There are not two different chunks.
    """
    chunks = list(dict.fromkeys(stripped for text in texts if (stripped := text.strip())))
    if len(chunks) < 2:
        raise ValueError("calibration cases need at least two different chunks")
    rng = random.Random(seed)
    words = [frozenset(chunk.lower().split()) for chunk in chunks]
    cases = []
    for number, target in enumerate(rng.sample(range(len(chunks)), min(n, len(chunks))), 1):
        nearest = sorted(range(len(chunks)), key=lambda i: (i != target, -_likeness(words[target], words[i])))
        chosen = nearest[: max(2, num_passages)]
        rng.shuffle(chosen)
        passages = tuple(Passage(chunks[i], supporting=i == target) for i in chosen)
        question = f'What does the text say about "{_topic(chunks[target])}"?'
        cases.append(Case(f"chunk-{number}", "qa", question, (), passages, dataset="chunks"))
    return cases


def _cut(text: str, max_words: int) -> Iterator[str]:
    chunk: list[str] = []
    size = 0
    for paragraph in _paragraphs(text, max_words):
        length = len(paragraph.split())
        if chunk and size + length > max_words:
            yield "\n\n".join(chunk)
            chunk, size = [], 0
        chunk.append(paragraph)
        size += length
    if chunk:
        yield "\n\n".join(chunk)


def _paragraphs(text: str, max_words: int) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line)
            continue
        paragraph, lines = "\n".join(lines), []
        words = paragraph.split()
        if len(words) <= max_words:
            yield from [paragraph] if words else []
        else:
            yield from (" ".join(words[at : at + max_words]) for at in range(0, len(words), max_words))


def _likeness(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / len(left | right)


def _topic(chunk: str) -> str:
    first, *others = chunk.splitlines()
    words = first.strip("#*= ").split()
    if not words or not others or len(words) > _TITLE_WORDS:
        words = chunk.split()[:_OPENING_WORDS]
    return " ".join(words)
