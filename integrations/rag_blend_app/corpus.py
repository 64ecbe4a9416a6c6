"""Documents and questions of the demo and the examples: Python's own language reference, or a directory of yours."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rag_blend_app.encoding import UTF_8, decode
from rag_blend_app.terminal import printable

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4.12
"""Measured with the demo model's tokenizer on the topics below; used only to size the collection."""

TOPICS = (
    "types",
    "compound",
    "formatstrings",
    "debugger",
    "attribute-access",
    "execmodel",
    "import",
    "calls",
)
"""Long prose topics of ``pydoc_data`` that do not repeat each other. The last one is there to fill up the
collection on Python versions whose other topics are shorter."""

QUESTIONS: list[str] = [
    "How do I set a conditional breakpoint in pdb?",
    "What happens to an exception if the finally clause executes a return statement?",
    "What do !r and !s mean in a format string?",
    "Why is a mutable default parameter value shared between calls of a function?",
    "How are names resolved in nested blocks, and when is UnboundLocalError raised?",
    "How does an instance method get its self argument, and what does __get__ have to do with it?",
]
"""What a reader of the default collection might ask. The last answer is spread over two documents."""

SUFFIXES = frozenset({".txt", ".md", ".rst"})


@dataclass(frozen=True)
class Doc:
    """One document of a collection."""

    title: str  # heading of the topic, or path below the user's directory
    text: str


def load_documents(path: Path | None = None, max_tokens: int | None = None) -> list[Doc]:
    """Load the documents to index, always the same ones in the same order.

    Args:
        path: A directory of ``.txt``, ``.md`` and ``.rst`` files, searched with its subdirectories. Hidden
            files are skipped, and so are those that cannot be read, which a warning names. Without it, a part
            of the Python language reference that comes with every Python.
        max_tokens: Stop before the document that would make the collection larger than about this many
            tokens. By default a directory is taken whole and the language reference up to 41,000 tokens.

    Raises:
        NotADirectoryError: ``path`` is not a directory.
        FileNotFoundError: There is no document below ``path``.
    """
    if path is None:
        return _within(_topics(), 41_000 if max_tokens is None else max_tokens)
    docs = _within(_files(path), max_tokens)
    if not docs:
        raise FileNotFoundError(
            f"No documents found in {path.absolute()}: it has no readable, non-empty file that ends in "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    return docs


def questions_for(docs: list[Doc], count: int = 6) -> list[str]:
    """Questions about any collection, made of titles and first lines of paragraphs.

    They are spread over the documents; where there are fewer documents than questions, over the paragraphs of
    each as well.
    """
    chosen = docs[:: max(1, len(docs) // count)][:count]
    rounds = -(-count // max(1, len(chosen)))
    questions = (
        f"What does the document '{doc.title}' say about {_opening(doc.text, part / rounds)}?"
        for part in range(rounds)
        for doc in chosen
    )
    return list(dict.fromkeys(questions))[:count]


def _topics() -> Iterator[Doc]:
    from pydoc_data.topics import topics

    for name in TOPICS:
        if name in topics:  # the list of topics differs a little between Python versions
            text = _plain(topics[name])
            yield Doc(title=text.partition("\n")[0], text=text)


def _plain(text: str) -> str:
    """Take away what is only typography: rules, lines under headings, bold marks, runs of blank lines."""
    text = re.sub(r'^([*=~^"#-])\1{2,}\n', "", text, flags=re.MULTILINE)
    # Not the stars of "**kwds" or of '***centered***' in a sample of code.
    text = re.sub(r"""(?<![*"'\w])\*\*(?=\S)([^*"\n]+)(?<=\S)\*\*(?![*\w])""", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _files(directory: Path) -> Iterator[Doc]:
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory.absolute()} is not a directory of documents")
    for file in sorted(directory.rglob("*")):
        relative = file.relative_to(directory)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or file.suffix.lower() not in SUFFIXES or not file.is_file():
            continue
        if text := _text_of(file, printable(str(relative))):
            yield Doc(title=relative.as_posix(), text=text)


def _text_of(file: Path, name: str) -> str:
    """What a file says, stripped; nothing if it cannot be read."""
    try:
        found = decode(file.read_bytes())
    except (OSError, ValueError) as error:
        logger.warning("%s: %s; it is passed over", name, error)
        return ""
    if found.encoding != UTF_8 or found.lost:
        logger.warning("%s: is no sound UTF-8, was read as %s", name, found.encoding)
    return found.text.strip()


def _within(docs: Iterator[Doc], max_tokens: int | None) -> list[Doc]:
    """The first documents that fit, but at least one where there is one."""
    chosen: list[Doc] = []
    characters = 0
    for doc in docs:
        characters += len(doc.text)
        if chosen and max_tokens is not None and characters / CHARACTERS_PER_TOKEN > max_tokens:
            break
        chosen.append(doc)
    return chosen


def _opening(text: str, position: float, length: int = 60) -> str:
    """The first line of the paragraph at ``position`` (0 is the first, 1 past the last), as a quotation."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if re.search(r"\w", part)] or [text]
    paragraph = paragraphs[int(len(paragraphs) * position)]
    line = next((line for line in paragraph.splitlines() if re.search(r"\w", line)), paragraph)
    line = line.strip(" \t#*=-:.")
    return f'"{line}"' if len(line) <= length else f'"{line[:length].rsplit(" ", 1)[0]} …"'
