"""Entries as files of a local directory, which holds no more than a quota.

    kv/ab/ab12….safetensors     one entry; the name is the key
    kv/ab/ab12….safetensors.bad a damaged entry, set aside for inspection; the latest few are kept
    kv/records/….json           small records, e.g. the text that chunks were primed with
    kv/documents.sqlite         document -> keys (never the truth about which entries exist)
    kv/index.sqlite             size, label and last use of each file; made again from the files when it is lost

What has one of these names but is no such file (damaged, a directory, a FIFO) is renamed to `….bad` when it is in the
way. The directory may be removed under an open backend: it is made again when something is written.

The quota belongs to the directory. Before an entry is written, the entries that were not used for longest are removed
until there is room for it, and what is being written counts; records and the two tables do not. An entry that is being
read stays readable: this process does not remove it, another one takes away its name but not the open file.

The files are private to the user (0700 / 0600): a KV cache reveals the text it was made from.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl

import numpy as np

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.sizes import format_bytes, parse_bytes
from rag_blend.storage._documents import DocumentTable
from rag_blend.storage._files import (
    NotAFileError,
    Temp,
    bad,
    link_unless_there,
    open_regular,
    remove,
    rename_over,
    temp_beside,
    write_durably,
)
from rag_blend.storage._fork import repair_after_fork
from rag_blend.storage._index import FileIndex
from rag_blend.storage._layout import SUFFIX, Facts, Layout
from rag_blend.storage._quota import default_quota
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, StorageStats

logger = logging.getLogger(__name__)

_TRIM = "trim"  # stands for a file in the index while room is made for none

_OPTIONS = re.compile(r"(.*)\?([a-z_]+=[^/?]*)", re.DOTALL)
_QUERY_PATIENCE_SECONDS = 1.0


class _FileReader(EntryReader):
    _fd = -1

    def __init__(self, path: Path, being_read: dict[int, str]) -> None:
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size
        self._being_read = being_read
        being_read[id(self)] = path.name

    def read(self, offset: int, length: int) -> Bytes:
        # pread, never mmap: a file truncated by somebody else must be an error here, not a SIGBUS.
        data = np.empty(length, dtype=np.uint8)
        rest = data.data
        while rest:
            done = os.preadv(self._fd, [rest], offset)
            if done == 0:
                raise CorruptChunkError(f"entry ends at byte {offset}, {len(rest)} more were expected")
            rest, offset = rest[done:], offset + done
        return data

    def close(self) -> None:
        if self._fd >= 0:
            self._being_read.pop(id(self), None)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def directory_and_quota(rest: str) -> tuple[Path, int | None]:
    """The directory that a `disk://` URL names, and its quota in bytes. `rest` is what stands behind the slashes.

    Raises:
        ValueError: It names none, or an option that is not known.
    """
    found = _OPTIONS.fullmatch(rest)
    directory, said = found.groups() if found else (rest, "")
    options = dict(parse_qsl(said, keep_blank_values=True))
    if not directory:
        raise ValueError("disk:// needs a directory")
    if options.keys() - {"quota"}:
        raise ValueError(f"disk:// knows the option quota, as in disk://kv?quota=20GB, but not {said!r}")
    return Path(directory).expanduser(), parse_bytes(options["quota"]) if "quota" in options else None


class DiskBackend(StorageBackend):
    """One file per entry, published by temp file + fsync + rename, within a quota.

    Args:
        directory: Where the entries live; made (mode 0700) when missing.
        quota_bytes: What they may take up; None: half of the space that is free, what they take up already included.
            Of several processes with different quotas each keeps its own when it writes.
    """

    def __init__(self, directory: str | os.PathLike[str], quota_bytes: int | None = None) -> None:
        if quota_bytes is not None and quota_bytes < 1:
            raise ValueError(f"a quota of {quota_bytes} bytes has room for nothing")
        self.directory = Path(directory).expanduser()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._layout = Layout(self.directory)
        self._documents = DocumentTable(self.directory / "documents.sqlite")
        self._index = FileIndex(self._layout)
        self._being_read: dict[int, str] = {}  # name of the file by id of its reader; each step is atomic, so no lock
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._complained = False
        repair_after_fork(self)
        if not os.access(self.directory, os.W_OK | os.X_OK):
            self._complain("cannot be written: what is stored there is used, nothing is added")
        held = self._held_after_sweep()
        self.quota_bytes = default_quota(self.directory, held) if quota_bytes is None else quota_bytes

    @classmethod
    def from_url(cls, rest: str) -> DiskBackend:
        """`disk://some/dir`, `disk://some/dir?quota=20GB`, or just the directory."""
        return cls(*directory_and_quota(rest))

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`.

        Raises:
            OSError: As there; with errno ENOSPC also if the quota leaves no room.
        """
        path = self._layout.entry(key)
        if len(data) > self.quota_bytes:
            self._refuse(f"an entry of {len(data):,} bytes is larger than the quota of {self.quota_bytes:,} bytes")
        with temp_beside(path) as temp, self._room_for(temp, path, len(data)):
            write_durably(temp, data)
            rename_over(temp, path)
        with self._tolerating_the_index():
            self._index.update([path.name, temp.path.name], {path.name: label})

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`."""
        path = self._layout.entry(key)
        try:
            reader = _FileReader(path, self._being_read)
        except FileNotFoundError:
            raise ChunkNotFoundError(key) from None
        except NotAFileError as error:
            raise CorruptChunkError(str(error)) from error
        self._index.used(path.name)
        return reader

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        path = self._layout.entry(key)
        if not bad(path).is_dir():
            bad(path).unlink(missing_ok=True)  # it reveals the text as well
        was_there = remove(path)
        with self._tolerating_the_index():
            self._index.update([path.name, bad(path).name])
        return was_there

    def quarantine(self, key: str) -> None:
        """Rename to `.bad`, for inspection; if even that fails, the entry stays and is refused again."""
        path = self._layout.entry(key)
        with contextlib.suppress(OSError):
            os.replace(path, bad(path))
            with self._tolerating_the_index():
                self._index.update([path.name, bad(path).name], patience=_QUERY_PATIENCE_SECONDS)

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`."""
        return self._layout.keys()

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """See `StorageBackend.labels`. Unknown is that of an entry which changed without this package."""
        found, doubtful = self._compared()
        entries = {name for name in found if name.endswith(SUFFIX)}
        untold = entries - doubtful
        with self._tolerating_the_index():
            for name, label in self._index.labels():
                if name in untold:
                    untold.remove(name)
                    yield name.removesuffix(SUFFIX), label
        for name in untold | entries & doubtful:
            yield name.removesuffix(SUFFIX), b""

    def trim(self) -> int:
        """Make the directory fit its quota now, not with the next write; returns how many entries were removed."""
        self._compared()  # what the index does not know yet counts as well
        being_read = set(self._being_read.copy().values())
        made = self._index.reserve(_TRIM, 0, _TRIM, self.quota_bytes, being_read)
        self._index.release(_TRIM)
        self._count("evicted", made.evicted)
        return made.evicted

    def stats(self) -> StorageStats:
        """See `StorageBackend.stats`. Counted are ``evicted``, ``refused`` (no room) and ``swept`` (temp files)."""
        found, _ = self._compared()
        sizes = [facts.size for name, facts in found.items() if facts and name.endswith(SUFFIX)]
        with self._lock:
            return StorageStats(len(sizes), sum(sizes), self.quota_bytes, dict(self._counts))

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        self._documents.link(document, keys)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        return self._documents.needed_only_by(documents)

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `StorageBackend.needed_by_others`."""
        return self._documents.needed_by_others(documents, keys)

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        self._documents.unlink(documents)

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """See `StorageBackend.documents`."""
        return iter(self._documents.all())

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        try:
            with os.fdopen(open_regular(self._layout.record(name)), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`."""
        return self._layout.records()

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        path = self._layout.record(name)
        with temp_beside(path) as temp:
            write_durably(temp, data)
            link_unless_there(temp, path)

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        remove(self._layout.record(name))

    def close(self) -> None:
        """See `StorageBackend.close`."""
        self._index.write_uses(_QUERY_PATIENCE_SECONDS)
        self._index.close()
        self._documents.close()

    def after_fork(self) -> None:
        """See `repair_after_fork`."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _room_for(self, temp: Temp, path: Path, size: int) -> Iterator[None]:
        """Make room, which is taken while the body runs and given back if that fails."""
        name, being_read = temp.path.name, set(self._being_read.copy().values())
        made = self._index.reserve(name, size, path.name, self.quota_bytes, being_read)
        if made.evicted and not self._count("evicted", made.evicted):
            logger.warning(
                "%s has reached its quota of %s: the entries that were not used for longest are removed. A larger one "
                "is set by disk://…?quota=20GB", self.directory, format_bytes(self.quota_bytes),
            )  # fmt: skip
        if made.missing:
            self._refuse(
                f"no room for {size:,} bytes within the quota of {self.quota_bytes:,} bytes: what is left is being "
                f"read or written"
            )
        try:
            yield
        except BaseException:
            with self._tolerating_the_index():
                self._index.release(name)
            raise

    def _held_after_sweep(self) -> int:
        """Remove what killed writers left behind; returns the bytes of what is there."""
        try:
            self._count("swept", self._layout.sweep())
            return sum(facts.size for facts in self._compared()[0].values() if facts)
        except OSError as error:
            self._complain(f"cannot be listed: {error}")
            return 0

    def _compared(self) -> tuple[dict[str, Facts | None], set[str]]:
        """What is there, and of which files the index had not known that or is not to be had."""
        found = self._layout.scan()
        doubtful = set(found)
        with self._tolerating_the_index():
            doubtful = self._index.differing(found)
            self._index.update(doubtful)
        return found, doubtful

    @contextlib.contextmanager
    def _tolerating_the_index(self) -> Iterator[None]:
        """The files are enough to answer, so trouble with the index is worth a line and no more."""
        try:
            yield
        except OSError as error:
            self._complain(f"is used without its index, so listing takes longer and labels get lost: {error}")

    def _complain(self, what: str) -> None:
        logger.log(logging.DEBUG if self._complained else logging.WARNING, "%s %s", self.directory, what)
        self._complained = True

    def _refuse(self, why: str) -> NoReturn:
        self._count("refused")
        raise OSError(errno.ENOSPC, why, str(self.directory))

    def _count(self, what: str, number: int = 1) -> int:
        """Returns how many it were before."""
        with self._lock:
            before = self._counts[what]
            if number:
                self._counts[what] += number
            return before
