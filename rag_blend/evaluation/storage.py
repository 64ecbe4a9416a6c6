"""How fast a storage backend is, beside plain files on the same disk, and how that changes as it fills up."""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rag_blend.storage import StorageBackend, open_storage

_SAMPLE = 50  # entries that are timed one by one
_LABEL = b"l" * 2300  # as that of a chunk of about 500 tokens


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """What was measured; medians over single entries.

    Attributes:
        storage: The backend's name, or ``"plain files"``.
        entries: How many there were.
        entry_bytes: Size of each.
        write_mb_s: Writing one, durably, in 10^6 bytes per second.
        cold_mb_s: Opening and reading one that the operating system has been asked to forget; None on a server.
        warm_mb_s: Opening and reading one again.
        open_ms: Opening one.
        list_s: Listing all of them with their labels, in a backend that was just opened, opening it included.
    """

    storage: str
    entries: int
    entry_bytes: int
    write_mb_s: float
    cold_mb_s: float | None
    warm_mb_s: float
    open_ms: float
    list_s: float


def measure_storage(
    place: str, counts: Sequence[int], entry_bytes: int, step: Callable[[], object] = lambda: None
) -> list[StorageSpeed]:
    """Fill a new, empty backend up to each of the counts, and measure there.

    Args:
        place: A URL, or ``"disk"`` or ``"plain"`` for a temporary directory below the current one.
        counts: Ascending numbers of entries.
        entry_bytes: Size of each entry.
        step: Called for each entry written.

    Raises:
        OSError: The medium refused.
    """
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-store-") as directory:
        local = Path(directory) if place in {"plain", "disk"} else None

        def make() -> StorageBackend | _PlainFiles:
            if place == "plain":
                return _PlainFiles(directory)
            return open_storage(place if local is None else local / "kv")

        backend, written, found = make(), 0, []
        try:
            for count in counts:
                seconds = []
                for number in range(written, count):
                    data = _content(number, entry_bytes)
                    started = time.perf_counter()
                    backend.write(_key(number), data, _LABEL)
                    seconds.append(time.perf_counter() - started)
                    step()
                written = count
                found.append(_measured(place, backend, make, count, entry_bytes, statistics.median(seconds), local))
        finally:
            if local is None:  # a server keeps what it has
                for number in range(written):
                    backend.delete(_key(number))
            backend.close()
    return found


def as_json(speeds: Sequence[StorageSpeed]) -> list[dict[str, object]]:
    """The same as JSON-like data."""
    return [asdict(speed) for speed in speeds]


def _measured(
    place: str,
    backend: StorageBackend | _PlainFiles,
    make: Callable[[], StorageBackend | _PlainFiles],
    count: int,
    size: int,
    write_s: float,
    local: Path | None,
) -> StorageSpeed:
    keys = [_key(int(number)) for number in np.random.default_rng(0).choice(count, min(count, _SAMPLE), replace=False)]
    cold = None
    if local is not None:
        _forget_pages(local)
        cold = statistics.median(_read_s(backend, key) for key in keys)
    warm = statistics.median(_read_s(backend, key) for key in keys)
    opening = statistics.median(_open_s(backend, key) for key in keys)
    started = time.perf_counter()
    other = make()
    listed = sum(1 for _ in other.labels())
    list_s = time.perf_counter() - started
    if other is not backend:
        other.close()
    assert listed >= count or "memory" in place
    rate = size / 1e6
    name = "plain files" if place == "plain" else place.partition("?")[0]
    return StorageSpeed(
        name, count, size, rate / write_s, None if cold is None else rate / cold, rate / warm, opening * 1e3, list_s
    )


def _read_s(backend: StorageBackend | _PlainFiles, key: str) -> float:
    started = time.perf_counter()
    with backend.open(key) as reader:
        reader.read(0, reader.size)
    return time.perf_counter() - started


def _open_s(backend: StorageBackend | _PlainFiles, key: str) -> float:
    started = time.perf_counter()
    backend.open(key).close()
    return time.perf_counter() - started


def _forget_pages(directory: Path) -> None:
    """Ask the operating system to drop the files from memory; no privilege is needed."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _key(number: int) -> str:
    return hashlib.sha256(f"bench {number}".encode()).hexdigest()


def _content(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


class _PlainFiles:
    """What the disk can do at most: one write, one fsync, one read; no checks, no index, no rename."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def write(self, key: str, data: bytes, label: bytes) -> None:
        with (self._directory / key).open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    def open(self, key: str) -> _PlainReader:
        return _PlainReader(self._directory / key)

    def labels(self) -> Iterator[tuple[str, bytes]]:
        return ((name, b"") for name in os.listdir(self._directory))

    def delete(self, key: str) -> None:
        (self._directory / key).unlink()

    def close(self) -> None:
        return None


class _PlainReader:
    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _PlainReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
