"""Entries as files of a local directory, and a small SQLite table for which document needs which entry.

    kv/ab/ab12….safetensors     one entry; the name is the key
    kv/ab/ab12….safetensors.bad a damaged entry, set aside for inspection
    kv/records/….json           small records, e.g. the text that chunks were primed with
    kv/documents.sqlite         document -> keys (never the truth about which entries exist)

The files are private to the user (0700 / 0600): a KV cache reveals the text it was made from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, checked_key

SUFFIX = ".safetensors"
_ENTRY = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_TEMP = re.compile(r"[0-9a-f]{64}\.(?:safetensors|json)\.([1-9][0-9]{0,8})\.[0-9a-f]{8}\.tmp")
_STALE_TEMP_SECONDS = 3600.0


class _FileReader(EntryReader):
    _fd = -1

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
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

    def write(self, key: str, data: bytes) -> None:
        """See `StorageBackend.write`."""
        path = self._path(key)
        with _published_at(path, data) as temp:
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
        _bad(path).unlink(missing_ok=True)  # it reveals the text as well
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

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

    def unlink(self, document: str) -> list[str]:
        """See `StorageBackend.unlink`."""
        return self._documents.unlink(document)

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        try:
            return self._record_path(name).read_bytes()
        except FileNotFoundError:
            return None

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        path = self._record_path(name)
        with _published_at(path, data) as temp, contextlib.suppress(FileExistsError):
            os.link(temp, path)  # unlike rename, fails when another process was first

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        self._record_path(name).unlink(missing_ok=True)

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

    def link(self, document: str, keys: Iterable[str]) -> None:
        rows = [(document, key) for key in keys]
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO needs VALUES (?, ?)", rows)

    def unlink(self, document: str) -> list[str]:
        with self._transaction() as db:
            orphans = db.execute(
                "SELECT key FROM needs AS mine WHERE document = ? AND NOT EXISTS "
                "(SELECT 1 FROM needs WHERE key = mine.key AND document <> mine.document)",
                (document,),
            ).fetchall()
            db.execute("DELETE FROM needs WHERE document = ?", (document,))
        return sorted(key for (key,) in orphans)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                db = self._connection()
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        pid = os.getpid()
        if pid not in self._by_process:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite would make it 0644
            self._by_process[pid] = _connected(self._path)
        return self._by_process[pid]

    def close(self) -> None:
        with self._lock:
            db = self._by_process.pop(os.getpid(), None)
            if db is not None:
                db.close()


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
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
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
