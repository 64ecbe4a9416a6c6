"""Files that are whole or absent and private, and paths at which anything may lie."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_STALE_TEMP_SECONDS = 3600.0


class Temp(NamedTuple):
    """A file that has not got its name yet, open for writing."""

    path: Path
    fd: int


@contextlib.contextmanager
def temp_beside(path: Path) -> Iterator[Temp]:
    """A new empty file beside `path`; the caller fills and names it, then the directory is synced.

    It is locked for as long as its writer lives, and gone at the end unless it was renamed.
    """
    if not path.parent.is_dir():
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fsync_directory(path.parent.parent)
    temp = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Temp(temp, fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            temp.unlink()
    fsync_directory(path.parent)


def write_durably(temp: Temp, data: bytes) -> None:
    """Write all of `data` and sync it."""
    rest = memoryview(data)
    while rest:  # a full disk shows itself as a short write before it raises
        done = os.write(temp.fd, rest)
        if not done:
            raise OSError(errno.EIO, "nothing could be written", str(temp.path))
        rest = rest[done:]
    os.fsync(temp.fd)


def rename_over(temp: Temp, path: Path) -> None:
    """Give the temp file its name, whatever has it now."""
    try:
        os.replace(temp.path, path)
    except IsADirectoryError:
        set_aside(path)
        os.replace(temp.path, path)


def link_unless_there(temp: Temp, path: Path) -> None:
    """Give the temp file its name unless a file has it: of several writers the first wins."""
    with contextlib.suppress(FileExistsError):
        if os.path.lexists(path) and not path.is_file():
            set_aside(path)
        os.link(temp.path, path)  # unlike rename, fails when another process was first


def is_stale(temp: Path, pid: int) -> bool:
    """Whether a killed writer left this behind: old, its process is no more, and nobody holds its lock.

    The process may live in another container and the clock may jump, but the lock ends with its holder. A file from
    the future is old as well: otherwise it would stay until a clock that was set back has caught up.
    """
    if abs(time.time() - temp.stat().st_mtime) < _STALE_TEMP_SECONDS or _is_running(pid):
        return False
    fd = os.open(temp, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here: age and process must do
    finally:
        os.close(fd)
    return True


class NotAFileError(OSError):
    """What has a file's name is none."""


def open_regular(path: Path) -> int:
    """Open for reading.

    Raises:
        NotAFileError: It is a FIFO, which would block for ever, or a directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(errno.EINVAL, "not a regular file", str(path))
    return fd


def remove(path: Path) -> bool:
    """Delete a file of ours; returns whether there was one. A directory that has its name is set aside."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError:
        if not path.is_dir():
            raise
        set_aside(path)
        return False
    return True


def set_aside(path: Path) -> None:
    """Rename to `.bad`, under a name of its own if that one is taken by something that cannot be replaced."""
    try:
        os.replace(path, bad(path))
    except FileNotFoundError:
        raise
    except OSError:
        os.replace(path, path.with_name(f"{path.name}.{secrets.token_hex(4)}.bad"))


def bad(path: Path) -> Path:
    """Where something damaged is kept for inspection."""
    return path.with_name(path.name + ".bad")


def list_directory(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What lies in a directory; nothing, if there is none."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_at(path: Path) -> tuple[int, int] | None:
    """Which file has this name, if any. The number of an open file is not given to another one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def one_process_at_a_time(directory: Path) -> Iterator[None]:
    """A lock on the directory itself."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks; the window is narrow
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def fsync_directory(path: Path) -> None:
    """Make renames in it durable."""
    with contextlib.suppress(OSError):  # not every file system lets a directory be opened
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
