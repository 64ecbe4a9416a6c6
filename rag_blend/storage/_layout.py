"""What lies where in the directory of a disk backend, and which of it counts towards the quota."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rag_blend.storage._files import is_stale, list_directory
from rag_blend.storage.base import checked_key

SUFFIX = ".safetensors"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{64})\.json")
_TEMP = re.compile(r"[0-9a-f]{64}\.(?:safetensors|json)\.([1-9][0-9]{0,8})\.[0-9a-f]{8}\.tmp")
_KINDS = re.compile(
    rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}"
    r"(?:(?P<bad>(?:\.[0-9a-f]{8})?\.bad)|(?P<temp>\.[1-9][0-9]{0,8}\.[0-9a-f]{8}\.tmp))?"
)


class Kind(StrEnum):
    """What takes up space: entries, what is kept of damaged ones, and what is being written."""

    ENTRY = "entry"
    BAD = "bad"
    TEMP = "temp"


class Facts(NamedTuple):
    """What the file system says about a file: size in bytes, and when it was last changed."""

    size: int
    mtime_ns: int


class Layout:
    """The files below `directory`. All names of one key begin with it and lie in the folder of its first two digits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def entry(self, key: str) -> Path:
        """The file of an entry."""
        return self.path(f"{checked_key(key)}{SUFFIX}")

    def record(self, name: str) -> Path:
        """The file of a small record."""
        return self.directory / "records" / f"{checked_key(name)}.json"

    def path(self, name: str) -> Path:
        """The file with a name that `scan` gave."""
        return self.directory / name[:2] / name

    def keys(self) -> Iterator[str]:
        """The keys of all entries, be they files or something else that is in the way."""
        for found in self._ours():
            if found.name.endswith(SUFFIX):
                yield found.name.removesuffix(SUFFIX)

    def records(self) -> Iterator[str]:
        """The names of all records."""
        for found in list_directory(self.directory / "records"):
            name = _RECORD.fullmatch(found.name)
            if name and found.is_file():
                yield name[1]

    def scan(self) -> dict[str, Facts | None]:
        """Name and facts of everything that takes up space; None for what has such a name but is no file."""
        return {found.name: _facts(found) for found in self._ours()}

    def look(self, name: str) -> Facts | None:
        """The same of one of them; None too if it is not ours or not there."""
        return _facts(self.path(name)) if kind_of(name) else None

    def sweep(self) -> int:
        """Remove what killed writers left behind; returns how many files."""
        swept = 0
        for folder in list_directory(self.directory):
            if not _FOLDER.fullmatch(folder.name) and folder.name != "records":
                continue
            for found in list_directory(folder.path):
                temp = _TEMP.fullmatch(found.name)  # other people's files are none of our business
                with contextlib.suppress(OSError):
                    if temp and is_stale(Path(found.path), int(temp[1])):
                        os.unlink(found.path)
                        swept += 1
        return swept

    def _ours(self) -> Iterator[os.DirEntry[str]]:
        for folder in list_directory(self.directory):
            if _FOLDER.fullmatch(folder.name):
                for found in list_directory(folder.path):
                    if found.name.startswith(folder.name) and kind_of(found.name):
                        yield found


def kind_of(name: str) -> Kind | None:
    """What a file is, by its name; None if it is not ours."""
    found = _KINDS.fullmatch(name)
    if found is None:
        return None
    return Kind.BAD if found["bad"] else Kind.TEMP if found["temp"] else Kind.ENTRY


def entry_of(name: str) -> str:
    """The entry that the file of this name is about, or will be."""
    return name.partition(SUFFIX)[0] + SUFFIX


def _facts(path: Path | os.DirEntry[str]) -> Facts | None:
    try:
        found = path.stat()
    except OSError:  # it went meanwhile
        return None
    return Facts(found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
