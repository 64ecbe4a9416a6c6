"""The disk backend's quota: what it counts, what it removes, and what nothing may come between."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from contracts.storage import content, key
from processes import dead_pid, in_child, status_of

from rag_blend.errors import ChunkNotFoundError
from rag_blend.sizes import format_bytes, parse_bytes
from rag_blend.storage import open_storage
from rag_blend.storage._files import Temp, rename_over
from rag_blend.storage._quota import default_quota
from rag_blend.storage.disk import DiskBackend

YEAR = 365 * 86400
REAL_WRITE = os.write


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskBackend]:
    """Room for ten entries of 100 bytes."""
    backend = DiskBackend(tmp_path / "kv", quota_bytes=1000)
    yield backend
    backend.close()


def put(backend: DiskBackend, *names: object, size: int = 100) -> None:
    for name in names:
        backend.write(key(name), bytes(size))


def names_of(backend: DiskBackend, *candidates: object) -> list[object]:
    """Those of the candidates that are stored."""
    stored = set(backend.keys())
    return [name for name in candidates if key(name) in stored]


def entry_path(directory: Path, name: object) -> Path:
    return directory / key(name)[:2] / f"{key(name)}.safetensors"


def taken(directory: Path) -> int:
    """Bytes of everything that belongs to entries; a file that is renamed meanwhile counts once."""
    sizes: dict[int, int] = {}
    for folder in directory.glob("[0-9a-f][0-9a-f]"):
        for found in os.scandir(folder):
            try:
                facts = os.stat(found.path)
            except FileNotFoundError:
                continue
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


# --- how it is said ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000000", 10**6),
        ("7B", 7),
        ("20GB", 20 * 10**9),
        ("20gb", 20 * 10**9),
        ("1 KB", 1000),
        ("1.5MB", 1_500_000),
        ("2TB", 2 * 10**12),
        ("3KiB", 3072),
        ("512 MiB", 512 * 2**20),
        ("1GiB", 2**30),
        ("0.5TiB", 2**39),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.1", "1e9", "20 G B", "5iB", "1,000", "five", "20GB?", "½GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    sizes = [0, 999, 1000, 20 * 10**9, 5 * 10**15]
    assert [format_bytes(size) for size in sizes] == ["0 B", "999 B", "1.0 KB", "20.0 GB", "5000.0 TB"]


def test_the_url_says_it(tmp_path: Path) -> None:
    for url, quota in ((f"disk://{tmp_path}/kv?quota=2MB", 2_000_000), (f"DISK://{tmp_path}/kv?quota=77", 77)):
        backend = open_storage(url)
        assert isinstance(backend, DiskBackend)
        assert (backend.directory, backend.quota_bytes, backend.stats().quota_bytes) == (tmp_path / "kv", quota, quota)


@pytest.mark.parametrize("rest", ["kv?quota=", "kv?quota=much", "kv?qouta=5GB", "kv?quota=5GB&x=1", "?quota=5GB"])
def test_a_url_that_is_not_understood_is_refused(rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        open_storage(f"disk://{rest}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["what?", "what?/kv", "?", "a?quota=1/kv", "is it? yes"])
def test_a_directory_may_have_a_question_mark(name: str, tmp_path: Path) -> None:
    backend = open_storage(tmp_path / name)
    assert isinstance(backend, DiskBackend)
    assert backend.directory == tmp_path / name
    put(backend, 1)
    assert names_of(DiskBackend(tmp_path / name), 1) == [1]
    assert DiskBackend(tmp_path / "kv?quota=5").directory.name == "kv?quota=5"


@pytest.mark.parametrize("quota", [0, -1])
def test_no_room_at_all_is_a_mistake(quota: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quota"):
        DiskBackend(tmp_path, quota_bytes=quota)


def test_the_default_does_not_shrink_as_the_store_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000, 0, 6000 - taken(tmp_path)))
    for i in range(10):
        backend = DiskBackend(tmp_path)
        assert backend.quota_bytes == 3000
        put(backend, i, size=200)
        backend.close()
    assert default_quota(tmp_path, held=2000) == 3000


# --- what is removed ---


def test_what_was_not_used_for_longest_goes_first(disk: DiskBackend) -> None:
    put(disk, *range(10))
    assert names_of(disk, *range(10)) == [*range(10)]
    for name in (0, 2, 4):
        content(disk, key(name))
    put(disk, 10)
    assert names_of(disk, *range(11)) == [0, *range(2, 11)]
    put(disk, 11, 12, 13)
    assert names_of(disk, *range(14)) == [0, 2, 4, *range(7, 14)]
    assert disk.stats().entries == 10 and disk.stats().bytes == 1000
    assert disk.stats().counts == {"evicted": 4}


def test_uses_are_remembered_by_the_next_process(disk: DiskBackend) -> None:
    put(disk, *range(10))
    content(disk, key(0))
    disk.close()
    other = DiskBackend(disk.directory, quota_bytes=1000)
    put(other, 10)
    assert names_of(other, *range(11)) == [0, *range(2, 11)]
    other.close()


def test_the_clock_does_not_matter(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for name, shift in zip(range(10), (0, YEAR, -YEAR, 0, -YEAR, YEAR, YEAR, -YEAR, 0, YEAR), strict=True):
        monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
        put(disk, name)
        os.utime(entry_path(disk.directory, name), (now + shift,) * 2)
    content(disk, key(0))
    put(disk, *range(10, 15))
    assert names_of(disk, *range(15)) == [0, *range(6, 15)]


def test_only_as_much_as_needed_goes(disk: DiskBackend) -> None:
    put(disk, *range(10))
    put(disk, "big", size=250)
    assert names_of(disk, "big", *range(10)) == ["big", *range(3, 10)]
    put(disk, "small", size=50)  # fits without
    assert disk.stats().counts == {"evicted": 3}
    assert disk.stats().bytes == 1000


def test_large_entries_displace_each_other_and_not_many_small_ones_in_use(tmp_path: Path) -> None:
    disk = DiskBackend(tmp_path, quota_bytes=100_000)
    small = [f"small {i}" for i in range(300)]
    put(disk, *small)  # 30 % of the room
    for i in range(12):
        put(disk, f"large {i}", size=20_000)
        for name in small[i % 6 :: 6]:  # each is used once in six rounds: later than two large ones came
            content(disk, key(name))
    assert names_of(disk, *small) == small
    assert names_of(disk, *(f"large {i}" for i in range(12))) == ["large 9", "large 10", "large 11"]


def test_an_entry_larger_than_the_quota_is_refused(disk: DiskBackend) -> None:
    put(disk, *range(10))
    for name in ("new", 0):
        with pytest.raises(OSError, match=r"1,001 bytes.*1,000 bytes") as caught:
            disk.write(key(name), bytes(1001))
        assert caught.value.errno == errno.ENOSPC
    assert names_of(disk, *range(10)) == [*range(10)]
    assert disk.stats().counts == {"refused": 2}
    put(disk, "just fits", size=1000)
    assert list(disk.keys()) == [key("just fits")]


def test_what_is_replaced_makes_room_itself(disk: DiskBackend) -> None:
    put(disk, *range(10))
    put(disk, 3)
    put(disk, 5, size=60)
    put(disk, 7, size=140)
    assert names_of(disk, *range(10)) == [*range(10)]
    assert disk.stats().bytes == taken(disk.directory) == 1000
    put(disk, 7, size=240)
    assert names_of(disk, *range(10)) == [*range(1, 10)]


def test_room_is_made_before_anything_is_written(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fsync(fd: int) -> None:
        seen.append(taken(disk.directory))

    monkeypatch.setattr(os, "fsync", fsync)
    put(disk, *range(25))
    assert max(seen) == 1000
    assert not [size for size in seen if size > 1000]


def test_a_failed_write_gives_its_room_back(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    put(disk, *range(8))
    for call in ("write", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError):
                put(disk, "lost", size=200)
    put(disk, 8, 9)
    assert names_of(disk, "lost", *range(10)) == [*range(10)]
    assert disk.stats().counts == {}


def test_a_lowered_quota_holds_from_the_next_write(disk: DiskBackend) -> None:
    put(disk, *range(10))
    smaller = DiskBackend(disk.directory, quota_bytes=500)
    assert smaller.stats().bytes == 1000
    put(smaller, 10)
    assert names_of(smaller, *range(11)) == [*range(6, 11)]
    put(disk, 11, 12)
    assert disk.stats().bytes == 700
    smaller.close()


def test_removing_is_reported_once_with_the_way_out(disk: DiskBackend, caplog: pytest.LogCaptureFixture) -> None:
    put(disk, *range(10))
    assert caplog.records == []
    put(disk, *range(10, 15))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "quota of 1.0 KB" in caplog.text and "?quota=" in caplog.text and str(disk.directory) in caplog.text


def test_somebody_elses_entry_that_cannot_be_removed_is_passed_over(
    disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(disk, *range(10))
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(key(0)):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    put(disk, 10)
    assert names_of(disk, *range(11)) == [0, *range(2, 11)]


# --- what is being read ---


def test_what_this_process_reads_stays(disk: DiskBackend) -> None:
    put(disk, *range(10))
    with disk.open(key(0)), disk.open(key(0)):
        put(disk, *range(10, 25))
        assert names_of(disk, 0) == [0]
        assert disk.stats().entries == 10
    put(disk, *range(25, 35))
    assert names_of(disk, *range(35)) == [*range(25, 35)]


def test_a_reader_that_is_dropped_holds_nothing(disk: DiskBackend) -> None:
    put(disk, *range(10))
    reader = disk.open(key(0))
    del reader
    put(disk, *range(10, 20))
    assert names_of(disk, 0) == []


def test_when_everything_is_being_read_a_write_is_refused(disk: DiskBackend) -> None:
    put(disk, *range(10))
    readers = [disk.open(key(i)) for i in range(10)]
    with pytest.raises(OSError, match=r"no room for 100 bytes within the quota of 1,000 bytes") as caught:
        put(disk, 10)
    assert caught.value.errno == errno.ENOSPC
    assert names_of(disk, *range(11)) == [*range(10)]
    readers[6].close()
    put(disk, 10)
    assert names_of(disk, *range(11)) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]
    for reader in readers:
        reader.close()


def test_what_would_not_make_enough_room_is_not_removed(disk: DiskBackend) -> None:
    put(disk, *range(10))
    readers = [disk.open(key(i)) for i in range(6)]
    with pytest.raises(OSError, match="no room for 500 bytes"):
        put(disk, "large", size=500)
    assert names_of(disk, *range(10)) == [*range(10)]
    put(disk, "just fits", size=400)
    assert names_of(disk, *range(10)) == [*range(6)]
    for reader in readers:
        reader.close()


def test_what_another_process_removes_is_read_to_its_end(disk: DiskBackend) -> None:
    disk.write(key(0), b"0123456789" * 10)
    with disk.open(key(0)) as reader:

        def displace() -> None:
            other = DiskBackend(disk.directory, quota_bytes=1000)
            put(other, *range(1, 12))

        assert status_of(in_child(displace)) == 0
        assert key(0) not in disk
        assert reader.read(0, 100).tobytes() == b"0123456789" * 10


# --- what else takes up space ---


def test_damaged_entries_count_and_go_first(disk: DiskBackend) -> None:
    put(disk, *range(10))
    for name in (8, 9):
        disk.quarantine(key(name))
    assert taken(disk.directory) == 1000 and disk.stats().bytes == 800
    put(disk, 10)
    assert [p.name[:64] for p in disk.directory.glob("*/*.bad")] == [key(9)]
    put(disk, 11)
    assert names_of(disk, *range(12)) == [*range(8), 10, 11]
    assert disk.stats().counts == {}
    put(disk, 12)
    assert names_of(disk, 0) == [] and disk.stats().counts == {"evicted": 1}


def test_the_latest_damaged_entries_are_kept(tmp_path: Path) -> None:
    disk = DiskBackend(tmp_path)
    put(disk, *range(30))
    for i in range(30):
        disk.quarantine(key(i))
    kept = {p.name.partition(".")[0] for p in disk.directory.glob("*/*.bad")}
    assert kept == {key(i) for i in range(14, 30)}


def test_what_a_killed_writer_left_counts_until_it_is_swept(disk: DiskBackend) -> None:
    def die() -> None:
        def write(fd: int, data: memoryview) -> int:
            REAL_WRITE(fd, bytes(data[:50]))
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.write = write
        put(disk, "lost", size=400)

    put(disk, *range(5))
    assert status_of(in_child(die)) == -signal.SIGKILL
    put(disk, 5)
    assert names_of(disk, *range(6)) == [*range(6)]
    put(disk, 6)  # 400 bytes are spoken for
    assert names_of(disk, *range(7)) == [*range(1, 7)]
    (temp,) = disk.directory.glob("*/*.tmp")
    os.utime(temp, (time.time() - 7200,) * 2)
    other = DiskBackend(disk.directory, quota_bytes=1000)
    assert other.stats().counts == {"swept": 1} and not temp.exists()
    put(other, 7, 8, 9, 10)
    assert names_of(other, *range(11)) == [*range(1, 11)]
    other.close()


def test_what_is_being_written_counts_as_what_it_will_be(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        (temp,) = disk.directory.glob("*/*.tmp")
        other = DiskBackend(disk.directory, quota_bytes=1000)
        assert other.stats().bytes == 300
        other._index.update([temp.name])
        other.close()
        with contextlib.closing(sqlite3.connect(disk.directory / "index.sqlite")) as db:
            counted.append(db.execute("SELECT sum(size) FROM files").fetchone()[0])
        return REAL_WRITE(fd, bytes(data[:150]))

    put(disk, *range(3))
    monkeypatch.setattr(os, "write", write)
    put(disk, "new", size=400)
    assert counted == [700] * 3
    assert disk.stats().bytes == 700


def test_records_do_not_count(disk: DiskBackend) -> None:
    put(disk, *range(10))
    for i in range(5):
        disk.put_record(key(i), bytes(1000))
        disk.link(f"document {i}", [key(i)])
    put(disk, 10)
    assert len(list(disk.records())) == 5 and disk.stats().entries == 10


# --- counted anew ---


def test_files_removed_by_hand_leave_room(disk: DiskBackend) -> None:
    put(disk, *range(10))
    for name in range(5):
        entry_path(disk.directory, name).unlink()
    assert (disk.stats().entries, disk.stats().bytes) == (5, 500)
    put(disk, *range(10, 15))
    assert names_of(disk, *range(15)) == [*range(5, 15)]


def test_files_added_by_hand_take_room(tmp_path: Path) -> None:
    source = DiskBackend(tmp_path / "source")
    put(source, *range(5))
    put(DiskBackend(tmp_path / "kv"), *range(5, 13))
    shutil.copytree(source.directory, tmp_path / "kv", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sqlite"))
    disk = DiskBackend(tmp_path / "kv", quota_bytes=1000)
    assert disk.stats().bytes == 1300
    put(disk, 13)
    assert disk.stats().bytes == taken(disk.directory) == 1000


def test_a_store_without_index_is_counted_and_its_oldest_files_go_first(tmp_path: Path) -> None:
    old = DiskBackend(tmp_path)
    put(old, *range(12))
    for i, name in enumerate((3, 1, 2)):
        os.utime(entry_path(tmp_path, name), (1000 + i, 1000 + i))
    old.close()
    (tmp_path / "index.sqlite").unlink()
    disk = DiskBackend(tmp_path, quota_bytes=1000)
    assert disk.stats().bytes == 1200
    put(disk, 12)
    assert names_of(disk, *range(13)) == [0, *range(4, 13)]


# --- several processes ---


class Watch:
    """Sums up the files while no process can remove one or begin to write one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = sqlite3.connect(directory / "index.sqlite", timeout=30, isolation_level=None)

    def taken(self) -> int:
        self._index.execute("BEGIN IMMEDIATE")
        try:
            return taken(self._directory)
        finally:
            self._index.execute("ROLLBACK")


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_four_writers_never_exceed_it_together(tmp_path: Path) -> None:
    quota = 200_000
    put(DiskBackend(tmp_path, quota), "first", size=3000)

    def write(worker: int) -> None:
        disk = DiskBackend(tmp_path, quota)
        for i in range(60):
            put(disk, (worker, i), size=3000 + 500 * (i % 7))
            with contextlib.suppress(ChunkNotFoundError):  # the others may be that quick
                content(disk, key((worker, i)))
        disk.close()

    pids = [in_child(lambda worker=worker: write(worker)) for worker in range(4)]  # type: ignore[misc]
    watch, seen = Watch(tmp_path), []
    while not all([_has_ended(pid) for pid in pids]):
        seen.append(watch.taken())
        time.sleep(0.005)
    assert [status_of(pid) for pid in pids] == [0] * 4
    assert len(seen) > 5 and max(seen) <= quota
    disk = DiskBackend(tmp_path, quota)
    stats = disk.stats()
    assert quota - 6000 < stats.bytes == taken(tmp_path) <= quota
    assert {len(content(disk, name)) for name in disk.keys()} <= {3000 + 500 * i for i in range(7)}
    disk.close()


def test_what_is_renamed_while_another_process_looks_around_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list is older than the entry, and the entry's writer has not told the index yet."""
    disk, other = DiskBackend(tmp_path, 100_000), DiskBackend(tmp_path, 100_000)
    put(disk, 1)
    seen = other._layout.scan()
    counted = []

    def rename_slowly(temp: Temp, path: Path) -> None:
        rename_over(temp, path)
        with monkeypatch.context() as patch:
            patch.setattr(other._layout, "scan", lambda: seen)
            other.stats()
        with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
            counted.append(index.execute("SELECT sum(size) FROM files").fetchone()[0])

    monkeypatch.setattr("rag_blend.storage.disk.rename_over", rename_slowly)
    put(disk, 2)
    assert counted == [taken(tmp_path)]


def test_killed_writers_do_not_break_it(tmp_path: Path) -> None:
    quota = 100_000
    DiskBackend(tmp_path, quota).write(key("first"), b"x")
    watch = Watch(tmp_path)
    for turn in range(6):

        def write(turn: int = turn) -> None:
            disk = DiskBackend(tmp_path, quota)
            for i in range(10_000):
                put(disk, (turn, i), size=4000)

        pid = in_child(write)
        try:
            until = time.monotonic() + 0.1 + 0.03 * turn
            while time.monotonic() < until:
                assert watch.taken() <= quota
        finally:
            os.kill(pid, signal.SIGKILL)
            assert status_of(pid) == -signal.SIGKILL
    disk = DiskBackend(tmp_path, quota)
    assert disk.stats().bytes <= taken(tmp_path) <= quota
    put(disk, *range(30), size=4000)
    assert watch.taken() <= quota
    assert names_of(disk, 29) == [29]
    disk.close()


# --- stale temp files ---


def test_the_sweep_does_not_believe_the_clock(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps makes a file look old, or from the future, while it is being written."""
    now, told = time.time(), os.pipe()
    put(disk, 1)
    temp = entry_path(disk.directory, 1).with_name(f"{key(1)}.safetensors.{dead_pid()}.0011aabb.tmp")

    def hold() -> None:  # a writer in another container: its number means nothing here
        def write(fd: int, data: memoryview) -> int:
            (own,) = disk.directory.glob("*/*.tmp")
            own.rename(temp)
            REAL_WRITE(told[1], b"!")
            signal.pause()
            return 0

        os.write = write
        put(disk, 1)

    pid = in_child(hold)
    try:
        assert os.read(told[0], 1) == b"!"
        for shift in (YEAR, -YEAR):
            monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
            DiskBackend(disk.directory, quota_bytes=1000).close()
            assert temp.exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        status_of(pid)
    monkeypatch.setattr(time, "time", lambda: now + 60)
    DiskBackend(disk.directory, quota_bytes=1000).close()
    assert temp.exists()  # young: on another machine its writer may live
    monkeypatch.setattr(time, "time", lambda: now - YEAR)
    DiskBackend(disk.directory, quota_bytes=1000).close()
    assert not temp.exists()
    assert content(disk, key(1)) == bytes(100)
    for end in told:
        os.close(end)


# --- a disk that is really full ---


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 4 MB."""
    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", directory]
        if os.getuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a file system cannot be mounted here")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


def test_a_full_disk_refuses_and_goes_on(small_disk: Path) -> None:
    disk = DiskBackend(small_disk / "kv", quota_bytes=10**9)
    written = []
    with pytest.raises(OSError) as caught:
        for i in range(100):
            put(disk, i, size=300_000)
            written.append(i)
    assert caught.value.errno == errno.ENOSPC
    assert 8 <= len(written) <= 13
    assert names_of(disk, *range(100)) == written
    assert not list(disk.directory.glob("*/*.tmp"))
    for name in written:
        assert content(disk, key(name)) == bytes(300_000)
    assert len(list(disk.labels())) == disk.stats().entries == len(written)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert shutil.disk_usage(small_disk).free == 0
    again = DiskBackend(small_disk / "kv", quota_bytes=10**9)
    with pytest.raises(OSError):
        put(again, "more", size=1000)
    assert again.delete(key(written[0])) is True  # what frees space needs none
    put(again, "more", size=1000)
    assert names_of(again, "more", *written) == ["more", *written[1:]]
    for backend in (disk, again):
        backend.close()


def test_the_default_quota_leaves_half_of_a_small_disk(small_disk: Path) -> None:
    disk = DiskBackend(small_disk / "kv")
    assert 1_900_000 < disk.quota_bytes < 2_100_000
    put(disk, *range(20), size=300_000)
    assert names_of(disk, *range(20)) == [*range(14, 20)]
    again = DiskBackend(disk.directory)
    assert abs(again.quota_bytes - disk.quota_bytes) < 100_000
    for backend in (disk, again):
        backend.close()
