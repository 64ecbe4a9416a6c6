"""Files become LlamaIndex documents, one each, through LlamaIndex's own readers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from llama_index.core import Document, SimpleDirectoryReader
from llama_index.core.readers.base import BaseReader
from llama_index.readers.file import PDFReader
from tqdm import tqdm

SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm", ".pdf")
_INVISIBLE = ("script", "style", "template", "noscript", "nav")
_BLOCKS = (
    "title", "h1", "h2", "h3", "h4", "h5", "h6", "p", "div", "section", "article", "blockquote", "pre", "br",
    "li", "dt", "dd", "tr", "td", "th",
)  # fmt: skip


@dataclass
class Reading:
    """What became of some files.

    Attributes:
        documents: One per file that has text; its id is the file's path.
        unread: Why nothing came of the others, by path.
    """

    documents: list[Document] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


class HTMLReader(BaseReader):
    """The visible text of a page; LlamaIndex's own `HTMLTagReader` reads one kind of tag, scripts included."""

    def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
        """Read one file."""
        soup = BeautifulSoup(file.read_bytes(), "html.parser")
        for tag in soup(_INVISIBLE):
            tag.decompose()
        for tag in soup(_BLOCKS):
            tag.insert_before("\n")  # or the last word of one would run into the first of the next
            tag.insert_after("\n")
        text = re.sub(r"\n\s*\n", "\n\n", soup.get_text())
        return [Document(text=text, metadata=extra_info or {})]


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Absolute paths of the files to read among paths and below directories; of those, hidden ones are left out.

    Raises:
        FileNotFoundError: A path does not exist, or there is no such file.
        OSError: A directory cannot be listed.
        ValueError: A file that was named is of another kind.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += _below(path)
        elif not path.exists():
            raise FileNotFoundError(f"there is no file or directory {str(path)!r}")
        elif path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path}: files of this kind are not read; known: {', '.join(SUFFIXES)}")
        else:
            found.append(path.resolve())
    if not found:
        where = ", ".join(map(str, paths))
        raise FileNotFoundError(f"no documents in {where}: looked for {', '.join(SUFFIXES)}")
    return list(dict.fromkeys(found))


def read(files: Sequence[Path], progress: bool) -> Reading:
    """Read files; one that is damaged or has no text does not keep the others from being read."""
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it comments on every oddity; what matters is raised
    reading = Reading()
    readers = {".pdf": PDFReader(return_full_document=True), ".html": HTMLReader(), ".htm": HTMLReader()}
    for path in tqdm(files, desc="files", unit="", disable=not progress):
        try:
            text = _text_of(path, readers)
        except Exception as error:  # a reader's, which may raise anything
            reading.unread[str(path)] = _reason(error)
            continue
        reading.documents.append(Document(text=text, id_=str(path)))
    return reading


def _below(directory: Path) -> Iterator[Path]:
    for where, directories, names in os.walk(directory, onerror=_refuse):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES and path.is_file():
                yield path.resolve()


def _refuse(error: OSError) -> None:
    """What lies in a directory that cannot be listed must not be taken for gone, and be forgotten."""
    raise error


def _text_of(path: Path, readers: dict[str, BaseReader]) -> str:
    parts = SimpleDirectoryReader.load_file(
        path, lambda _: {}, readers, encoding="utf-8-sig", errors="replace", raise_on_error=True
    )
    text = "\n\n".join(stripped for part in parts if (stripped := part.text.strip()))
    if "\0" in text:
        raise ValueError("is no text")
    if not text:
        raise ValueError("has no text" + (" (a scan needs OCR first)" if path.suffix.lower() == ".pdf" else ""))
    return text


def _reason(error: BaseException) -> str:
    """What went wrong in the first place: readers wrap it, some in a record of their attempts."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
