"""Files become LlamaIndex documents, one each."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from llama_index.core import Document
from llama_index.core.readers.base import BaseReader
from llama_index.readers.file import PDFReader
from tqdm import tqdm

from rag_blend_app.encoding import UTF_8, Decoded, decode

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
        converted: What those of them that are not in UTF-8 were read as, by path.
        damaged: How many characters of those that are not sound UTF-8 were read as U+FFFD, by path.
        empty: Paths of text files and pages without text.
        unread: Why nothing came of the others, by path.
    """

    documents: list[Document] = field(default_factory=list)
    converted: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def oddities(self) -> dict[str, dict[str, str] | dict[str, int] | list[str]]:
        """All but the documents, by name."""
        return {"converted": self.converted, "damaged": self.damaged, "empty": self.empty, "unread": self.unread}


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
        reader = readers.get(path.suffix.lower())
        try:
            found = decode(path.read_bytes()) if reader is None else _read_by(reader, path)
        except Exception as error:  # a reader's, which may raise anything
            reading.unread[str(path)] = _reason(error)
            continue
        if not (text := found.text.strip()):
            reading.empty.append(str(path))
            continue
        if found.encoding != UTF_8:
            reading.converted[str(path)] = found.encoding
        if found.lost:
            reading.damaged[str(path)] = found.lost
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


def _read_by(reader: BaseReader, path: Path) -> Decoded:
    parts = reader.load_data(path)
    text = "\n\n".join(stripped for part in parts if (stripped := part.text.strip()))
    if "\0" in text:
        raise ValueError("is no text")
    if not text and path.suffix.lower() == ".pdf":
        raise ValueError("has no text (a scan needs OCR first)")
    return Decoded(text)


def _reason(error: BaseException) -> str:
    """What went wrong in the first place: readers wrap it, some in a record of their attempts."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
