"""One SQLite file that threads and processes share, and that is made anew when it is lost or damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rag_blend.storage._files import file_at, one_process_at_a_time
from rag_blend.storage._fork import repair_after_fork

T = TypeVar("T")

_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.ETIMEDOUT,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}


class Database(ABC):
    """Transactions on the SQLite file at `path`; opened when first needed.

    Every method raises OSError when the file cannot be read, written or locked.

    Attributes:
        patience: Seconds to wait for others.
        damage: SQLite's errors that mean that the file has to be made anew.
    """

    # No WAL: it maps a file into memory, and when somebody truncates that, the process dies of SIGBUS (tried). Nor can
    # a directory that is read-only be read in that mode.

    patience = 30.0
    damage = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._by_process: dict[int, sqlite3.Connection] = {}  # a connection must not be used across a fork
        self._file: tuple[int, int] | None = None  # which file this process is, or was last, connected to
        repair_after_fork(self)

    @abstractmethod
    def prepare(self, db: sqlite3.Connection) -> None:
        """Make the tables unless they are there."""

    @abstractmethod
    def discard(self, path: Path) -> None:
        """Take the damaged file, or its journal, out of the way; no other process does so at the same time.

        Raises:
            FileNotFoundError: There is none.
        """

    def run(self, begin: str, work: Callable[[sqlite3.Connection], T], patience: float | None = None) -> T:
        """Do `work` in one transaction; in a new file, and thus once more, if the old one proves damaged.

        Args:
            begin: How the transaction begins: ``"BEGIN"`` to read, ``"BEGIN IMMEDIATE"`` to write.
            work: What to do.
            patience: Seconds to wait for others, in this process and elsewhere, if not those of the class.
        """
        patience = self.patience if patience is None else patience
        if not self._lock.acquire(timeout=patience):
            raise TimeoutError(errno.ETIMEDOUT, "used by another thread", str(self.path))
        try:
            try:
                return transaction(self._connection(patience), begin, work)
            except sqlite3.DatabaseError as error:
                if error_code(error) not in self.damage:
                    raise
                self._discard_once()
            return transaction(self._connection(patience), begin, work)
        except sqlite3.Error as error:
            raise OSError(_ERRNO.get(error_code(error), errno.EIO), str(error), str(self.path)) from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Disconnect; `run` connects again."""
        with self._lock:
            self._disconnect()

    def after_fork(self) -> None:
        """See `repair_after_fork`."""
        self._lock = threading.Lock()

    def _connection(self, patience: float) -> sqlite3.Connection:
        """A connection to the file that has the name now: somebody may have removed or replaced the directory."""
        pid = os.getpid()
        if pid not in self._by_process or self._file != file_at(self.path):
            self._disconnect()
            self._by_process[pid] = self._connected(patience)
        db = self._by_process[pid]
        db.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
        return db

    def _connected(self, patience: float) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite would make it 0644
        self._file = file_at(self.path)
        if not self.path.is_file():  # SQLite would wait for a FIFO for ever
            error = sqlite3.DatabaseError("not a regular file")
            error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise error
        db = sqlite3.connect(self.path, timeout=patience, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA secure_delete = ON")  # no traces of a text that was erased
            self.prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _disconnect(self) -> None:
        db = self._by_process.pop(os.getpid(), None)
        if db is not None:
            db.close()

    def _discard_once(self) -> None:
        self._disconnect()
        with one_process_at_a_time(self.path.parent):
            if self._file != file_at(self.path):
                return  # another process has done it: the name is that of a new file now
            # The journal first: SQLite would roll it back into the new file.
            for path in (self.path.with_name(self.path.name + "-journal"), self.path):
                with contextlib.suppress(FileNotFoundError):
                    self.discard(path)


def transaction(db: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
    """Do all of `work` or nothing."""
    db.execute(begin)
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return result


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary error code."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF
