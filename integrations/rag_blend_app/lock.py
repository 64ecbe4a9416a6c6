"""One ingestion at a time into a collection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rag_blend import RagBlendError


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keep other ingestions out of a directory, which is made if it is missing, and removed if nothing came of it.

    Raises:
        RagBlendError: There is one.
        OSError: The directory cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(directory / "ingest.lock", timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise RagBlendError(
            f"another ingestion is writing to {str(directory)!r}: wait for it, or name another directory: --index"
        ) from None
    try:
        yield
    finally:
        if list(directory.iterdir()) == [Path(lock.lock_file)]:
            Path(lock.lock_file).unlink()
            directory.rmdir()
        lock.release()
