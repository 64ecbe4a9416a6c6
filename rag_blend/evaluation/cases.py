"""Questions with the passages they are asked about, read from JSON lines."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

DEFAULT_PASSAGES = 10  # of a question that is asked about a corpus


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved text.

    Attributes:
        text: The text.
        title: Its title; "" for none.
        supporting: Whether it holds (part of) the answer.
        document: What it is a part of, as it is ingested with; "" for nothing.
        place: Where it stands among the document's passages; of equal places, those that come first stand first.
    """

    text: str
    title: str = ""
    supporting: bool = False
    document: str = ""
    place: int = 0

    @property
    def prompt_text(self) -> str:
        """The passage as it stands in a prompt, and as it is ingested: its title on a line of its own in front."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Case:
    """One question over some passages.

    Attributes:
        id: Unique within its data set and task.
        task: ``"qa"``, ``"unanswerable"``, ``"copy"`` or ``"lookup"``.
        question: The question.
        answers: Accepted answers; empty when the passages do not hold one.
        passages: In the order of the prompt.
        answerable: Whether the passages hold the answer.
        dataset: Where it comes from: the file's name without its ending, or "" for what was made up.
    """

    id: str
    task: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    answerable: bool = True
    dataset: str = ""

    @property
    def group(self) -> str:
        """Name under which results are summarised: data set and, unless it is plain questions, task."""
        return "/".join(part for part in (self.dataset, self.task if self.task != "qa" else "") if part) or "qa"


def load_cases(
    path: str | os.PathLike[str], limit: int | None = None, num_passages: int | None = None, seed: int = 0
) -> list[Case]:
    """Read cases from a JSON lines file whose rows are all of one of two formats.

    1. One question a row: ``{"id"?, "question", "answers": [..], "passages": [{"title"?, "text", "supporting"?,
       "document"?}]}``. No answers means that the passages hold none. Passages that name the same document stand in it
       in the order in which they appear.
    2. One article a row: ``{"title"?, "paragraphs": [{"text", "qas": [{"question", "answers": [..]}]}]}``. It is a
       document, and each question becomes a case over its own paragraph (supporting), the other paragraphs of its
       article, and paragraphs of the articles that follow (after the last one comes the first). Cases are taken in turn
       from all articles, and within an article from all its paragraphs, so that few cases already cover the corpus.

    Args:
        path: The file, UTF-8.
        limit: Read at most so many cases. None: all.
        num_passages: Passages per case: the supporting ones and as many others as fit, in the file's order. None: all
            that a row of format 1 has, 10 for format 2.
        seed: 0 takes cases in the file's order; any other number shuffles them before `limit` cuts.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is empty or not UTF-8, or a row is malformed; the text names file and line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if num_passages is not None and num_passages < 1:
        raise ValueError(f"num_passages must be at least 1, got {num_passages}")
    rows = list(_rows(Path(path)))
    if not rows:
        raise ValueError(f"{os.fspath(path)}: the file has no rows")
    corpus = [row for row in rows if "paragraphs" in row.fields]
    if corpus and len(corpus) < len(rows):
        other = next(row for row in rows if "paragraphs" not in row.fields)
        raise ValueError(f"{other.place}: this row has no 'paragraphs', but others have; one format per file")
    cases = _corpus_cases(corpus, num_passages or DEFAULT_PASSAGES) if corpus else [_case(row) for row in rows]
    if not cases:
        raise ValueError(f"{os.fspath(path)}: the file has no questions")
    if seed:
        random.Random(seed).shuffle(cases)
    return [replace(case, passages=kept(case.passages, num_passages)) for case in cases[:limit]]


def ingestible(cases: Iterable[Case]) -> dict[str, str]:
    """All passages as they are ingested, each once, and the document of each; in the documents' own order."""
    documents: dict[str, str] = {}
    for passage in sorted((passage for case in cases for passage in case.passages), key=lambda passage: passage.place):
        documents.setdefault(passage.prompt_text, passage.document)
    return documents


def shuffled(case: Case, seed: int) -> Case:
    """The case with its passages in another order, the same one for the same case and seed."""
    passages = list(case.passages)
    random.Random(f"{seed}/{case.dataset}/{case.id}").shuffle(passages)
    return replace(case, passages=tuple(passages))


def joined(case: Case, count: int) -> Case:
    """The case with every `count` passages that follow each other as one, the last one of those that are left."""
    passages = []
    for start in range(0, len(case.passages), count):
        group = case.passages[start : start + count]
        documents = {passage.document for passage in group}
        text = "\n\n".join(passage.prompt_text for passage in group)
        passages.append(
            Passage(
                text,
                supporting=any(passage.supporting for passage in group),
                document=documents.pop() if len(documents) == 1 else "",
                place=group[0].place,
            )
        )
    return replace(case, passages=tuple(passages))


def kept(passages: Sequence[Passage], num_passages: int | None) -> tuple[Passage, ...]:
    """The supporting passages and as many others, in their order, as make `num_passages`; None keeps all.

    There may be more, where more are supporting.
    """
    if num_passages is None:
        return tuple(passages)
    spare = num_passages - sum(passage.supporting for passage in passages)
    chosen = []
    for passage in passages:
        if passage.supporting:
            chosen.append(passage)
        elif spare > 0:
            chosen.append(passage)
            spare -= 1
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class _Row:
    path: Path
    line: int
    fields: Mapping[str, Any]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    def text(self, fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
        value = fields.get(name, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise ValueError(f"{self.place}: {name!r} must be a string that is not empty")
        return value.strip()

    def records(self, fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        value = fields.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise ValueError(f"{self.place}: {name!r} must be a list of objects that is not empty")
        return value

    def answers(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        value = fields.get("answers")
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise ValueError(f"{self.place}: 'answers' must be a list of strings that are not empty")
        return tuple(value)


def _rows(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _Row(path, number, _fields(path, number, line))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from error


def _fields(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}:{number}: a row must be an object, not {type(fields).__name__}")
    return fields


def _case(row: _Row) -> Case:
    passages = []
    for passage in row.records(row.fields, "passages"):
        supporting = passage.get("supporting", False)
        if not isinstance(supporting, bool):
            raise ValueError(f"{row.place}: 'supporting' must be true or false")
        title, document = row.text(passage, "title", ""), row.text(passage, "document", "")
        passages.append(Passage(row.text(passage, "text"), title, supporting, document))
    answers = row.answers(row.fields)
    return Case(
        id=row.text(row.fields, "id", str(row.line)),
        task="qa",
        question=row.text(row.fields, "question"),
        answers=answers,
        passages=tuple(passages),
        answerable=bool(answers),
        dataset=row.path.stem,
    )


def _corpus_cases(rows: Sequence[_Row], num_passages: int) -> list[Case]:
    articles = [_article(row) for row in rows]
    in_turn = []
    for number, (row, paragraphs) in enumerate(zip(rows, articles, strict=True)):
        following = [p for other in articles[number + 1 :] + articles[:number] for p in other]
        by_paragraph = [
            _questions(row, own, at, _around(paragraphs, at, following, num_passages))
            for at, own in enumerate(row.records(row.fields, "paragraphs"))
        ]
        in_turn.append(_interleaved(by_paragraph))
    return _interleaved(in_turn)


def _article(row: _Row) -> list[Passage]:
    title = row.text(row.fields, "title", "").replace("_", " ")
    document = f"{row.path.stem}:{row.line}"
    return [
        Passage(row.text(paragraph, "text"), title, document=document, place=place)
        for place, paragraph in enumerate(row.records(row.fields, "paragraphs"))
    ]


def _around(paragraphs: Sequence[Passage], own: int, following: Sequence[Passage], count: int) -> tuple[Passage, ...]:
    article = [replace(passage, supporting=at == own) for at, passage in enumerate(paragraphs)]
    return kept([*article, *following], count)


def _questions(row: _Row, paragraph: Mapping[str, Any], at: int, passages: tuple[Passage, ...]) -> list[Case]:
    asked = paragraph.get("qas", [])
    if not isinstance(asked, list) or not all(isinstance(item, dict) for item in asked):
        raise ValueError(f"{row.place}: 'qas' must be a list of objects")
    cases = []
    for number, item in enumerate(asked):
        answers = row.answers(item)
        case_id = f"{row.line}.{at + 1}.{number + 1}"
        question = row.text(item, "question")
        cases.append(Case(case_id, "qa", question, answers, passages, bool(answers), row.path.stem))
    return cases


def _interleaved(lists: Sequence[Sequence[Case]]) -> list[Case]:
    return [case for turn in zip_longest(*lists) for case in turn if case is not None]
