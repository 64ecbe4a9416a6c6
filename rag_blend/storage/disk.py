"""Entries as files of a local directory, and a small SQLite table for which document needs which entry.

    kv/ab/ab12….safetensors     one entry; the name is the key
    kv/ab/ab12….safetensors.bad a damaged entry, set aside for inspection
    kv/records/….json           small records, e.g. the text that chunks were primed with
    kv/documents.sqlite         document -> keys (never the truth about which entries exist)

What has one of these names but is no such file (damaged, a directory, a FIFO) is renamed to `….bad` when it is in the
way. The directory may be removed under an open backend: it is made again when something is written.

The files are private to the user (0700 / 0600): a KV cache reveals the text it was made from.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

import numpy as np

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, checked_key

logger = logging.getLogger(__name__)
T = TypeVar("T")

SUFFIX = ".safetensors"
_ENTRY = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_RECORD = re.compile(r"([0-9a-f]{64})\.json")
_TEMP = re.compile(r"[0-9a-f]{64}\.(?:safetensors|json)\.([1-9][0-9]{0,8})\.[0-9a-f]{8}\.tmp")
_STALE_TEMP_SECONDS = 3600.0


class _FileReader(EntryReader):
    _fd = -1

    def __init__(self, path: Path) -> None:
        self._fd = _open_regular(path)
        self.size = os.fstat(self._fd).st_size

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
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class DiskBackend(StorageBackend):
    """One file per entry, published by temp file + fsync + rename.

    Args:
        directory: Where the entries live; made (mode 0700) when missing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._documents = _DocumentTable(self.directory / "documents.sqlite")
        self._sweep_stale_temps()

    @classmethod
    def from_url(cls, rest: str) -> DiskBackend:
        """`disk://some/dir`, or just the directory."""
        if not rest:
            raise ValueError("disk:// needs a directory")
        return cls(rest)

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`."""
        path = self._path(key)
        with _published_at(path, data) as temp:
            try:
                os.replace(temp, path)
            except IsADirectoryError:
                _set_aside(path)
                os.replace(temp, path)

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`."""
        try:
            return _FileReader(self._path(key))
        except FileNotFoundError:
            raise ChunkNotFoundError(key) from None

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        path = self._path(key)
        if not _bad(path).is_dir():
            _bad(path).unlink(missing_ok=True)  # it reveals the text as well
        return _remove(path)

    def quarantine(self, key: str) -> None:
        """Rename to `.bad`, for inspection; if even that fails, the entry stays and is refused again."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            os.replace(path, _bad(path))

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`."""
        for path in self.directory.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}"):
            found = _ENTRY.fullmatch(path.name)
            if found:
                yield found[1]

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        self._documents.link(document, keys)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        return self._documents.needed_only_by(documents)

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        self._documents.unlink(documents)

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        try:
            with os.fdopen(_open_regular(self._record_path(name)), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`."""
        for path in self.directory.glob("records/*.json"):
            found = _RECORD.fullmatch(path.name)
            if found and path.is_file():
                yield found[1]

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        path = self._record_path(name)
        with _published_at(path, data) as temp, contextlib.suppress(FileExistsError):
            if os.path.lexists(path) and not path.is_file():
                _set_aside(path)
            os.link(temp, path)  # unlike rename, fails when another process was first

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        _remove(self._record_path(name))

    def close(self) -> None:
        """See `StorageBackend.close`."""
        self._documents.close()

    def _path(self, key: str) -> Path:
        return self.directory / checked_key(key)[:2] / f"{key}{SUFFIX}"

    def _record_path(self, name: str) -> Path:
        return self.directory / "records" / f"{checked_key(name)}.json"

    def _sweep_stale_temps(self) -> None:
        """Remove what killed writers left behind: old, and of a process that is no more."""
        oldest = time.time() - _STALE_TEMP_SECONDS
        for temp in self.directory.glob("*/*.tmp"):
            found = _TEMP.fullmatch(temp.name)  # other people's files are none of our business
            with contextlib.suppress(OSError):
                if found and temp.stat().st_mtime < oldest and not _is_running(int(found[1])):
                    temp.unlink()


class _DocumentTable:
    """document -> keys, shared by all processes that use the directory.

    Opened when first needed: a query needs no table, so it is answered from a read-only directory as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._by_process: dict[int, sqlite3.Connection] = {}  # a connection must not be used across a fork
        self._file: tuple[int, int] | None = None  # which file this process is, or was last, connected to

    def link(self, document: str, keys: Iterable[str]) -> None:
        rows = [(document, key) for key in keys]
        self._run("BEGIN IMMEDIATE", lambda db: db.executemany("INSERT OR IGNORE INTO needs VALUES (?, ?)", rows))

    def unlink(self, documents: AbstractSet[str]) -> None:
        rows = [(document,) for document in documents]
        if self._path.exists():
            self._run("BEGIN IMMEDIATE", lambda db: db.executemany("DELETE FROM needs WHERE document = ?", rows))

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        return self._run("BEGIN", lambda db: _needed_only_by(db, documents)) if self._path.exists() else []

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _run(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction; in a new table, and thus once more, if the old one proves damaged."""
        try:
            with self._lock:
                try:
                    return _transaction(self._connection(), begin, work)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._set_table_aside()
                return _transaction(self._connection(), begin, work)
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        """A connection to the file that has the name now: somebody may have removed or replaced the directory."""
        pid = os.getpid()
        if pid in self._by_process and self._file == _file_at(self._path):
            return self._by_process[pid]
        self._disconnect()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite would make it 0644
        self._file = _file_at(self._path)
        if not self._path.is_file():  # SQLite would wait for a FIFO for ever
            error = sqlite3.DatabaseError("not a regular file")
            error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise error
        self._by_process[pid] = _connected(self._path)
        return self._by_process[pid]

    def _disconnect(self) -> None:
        db = self._by_process.pop(os.getpid(), None)
        if db is not None:
            db.close()

    def _set_table_aside(self) -> None:
        self._disconnect()
        with _one_process_at_a_time(self._path.parent):
            if self._file != _file_at(self._path):
                return  # another process has done it: the name is that of a new table now
            logger.warning(
                "the table of documents, %s, is damaged and set aside: documents that were stored before cannot be "
                "forgotten by id until they are ingested again", self._path,
            )  # fmt: skip
            with contextlib.suppress(FileNotFoundError):  # first: SQLite would roll it back into the new table
                _set_aside(self._path.with_name(self._path.name + "-journal"))
            _set_aside(self._path)


def _connected(path: Path) -> sqlite3.Connection:
    # No WAL: processes that enter or leave that mode at once are told "database is locked" in spite of the timeout.
    db = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
    try:
        db.execute("CREATE TABLE IF NOT EXISTS needs (document TEXT, key TEXT, PRIMARY KEY (document, key))")
        db.execute("CREATE INDEX IF NOT EXISTS needs_key ON needs (key)")
    except BaseException:
        db.close()
        raise
    return db


def _transaction(db: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
    db.execute(begin)
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return result


def _needed_only_by(db: sqlite3.Connection, documents: AbstractSet[str]) -> list[str]:
    theirs: set[str] = set()
    for document in documents:
        theirs.update(key for (key,) in db.execute("SELECT key FROM needs WHERE document = ?", (document,)))
    return sorted(
        key
        for key in theirs
        if all(document in documents for (document,) in db.execute("SELECT document FROM needs WHERE key = ?", (key,)))
    )


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


def _file_at(path: Path) -> tuple[int, int] | None:
    """Which file has this name, if any. The number of an open file is not given to another one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _one_process_at_a_time(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks; the window is narrow
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_regular(path: Path) -> int:
    """Open for reading; a FIFO, which would block for ever, and a directory are refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _remove(path: Path) -> bool:
    """Delete a file of ours; returns whether there was one. A directory that has its name is set aside."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError:
        if not path.is_dir():
            raise
        _set_aside(path)
        return False
    return True


def _set_aside(path: Path) -> None:
    """Rename to `.bad`, under a name of its own if that one is taken by something that cannot be replaced."""
    try:
        os.replace(path, _bad(path))
    except FileNotFoundError:
        raise
    except OSError:
        os.replace(path, path.with_name(f"{path.name}.{secrets.token_hex(4)}.bad"))


def _bad(path: Path) -> Path:
    return path.with_name(path.name + ".bad")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _published_at(path: Path, data: bytes) -> Iterator[Path]:
    """Write `data` to a temp file beside `path`; the caller names it, then the directory is synced."""
    if not path.parent.is_dir():
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _fsync_directory(path.parent.parent)
    temp = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_durably(temp, data)
        yield temp
    finally:
        with contextlib.suppress(OSError):
            temp.unlink()
    _fsync_directory(path.parent)


def _write_durably(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        rest = memoryview(data)
        while rest:  # a full disk shows itself as a short write before it raises
            done = os.write(fd, rest)
            if not done:
                raise OSError(errno.EIO, "nothing could be written", str(path))
            rest = rest[done:]
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a directory be opened
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
