from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.storage import StorageContract, content, forget, key
from processes import dead_pid, in_child, status_of

import rag_blend.storage
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import StorageBackend, open_storage
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend

MODULES = {m.name for m in pkgutil.iter_modules(rag_blend.storage.__path__)}
SCHEMES = sorted(name for name in MODULES - {"base"} if not name.startswith("_"))
# How to open a backend that wants more than "<scheme>://": given an empty directory.
URLS: dict[str, Callable[[Path], str]] = {"disk": lambda directory: f"disk://{directory}/kv"}


OWN_FILES = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py"))


def test_every_backend_keeps_the_contract() -> None:
    """Here, or in a test file of its own, because it needs a server or other backends."""
    assert {"disk", "memory"} <= set(SCHEMES)
    for scheme in set(SCHEMES) & set(OWN_FILES):
        assert "(StorageContract)" in (Path(__file__).parent / f"test_{scheme}.py").read_text("utf-8"), scheme


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - set(OWN_FILES)))
class TestEveryBackend(StorageContract):
    @pytest.fixture
    def backend(self, scheme: str, tmp_path: Path) -> Iterator[StorageBackend]:
        backend = open_storage(URLS[scheme](tmp_path) if scheme in URLS else f"{scheme}://")
        assert type(backend).__module__ == f"rag_blend.storage.{scheme}"
        yield backend
        backend.close()


# --- open_storage ---


def test_nothing_is_memory_and_a_path_is_a_directory(tmp_path: Path) -> None:
    assert isinstance(open_storage(None), MemoryBackend)
    for where in (tmp_path / "a", str(tmp_path / "a"), f"disk://{tmp_path}/a", f"DISK://{tmp_path}/a"):
        backend = open_storage(where)
        assert isinstance(backend, DiskBackend)
        assert backend.directory == tmp_path / "a"
    assert open_storage(backend) is backend


def test_relative_and_home_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_storage("disk://kv/deep").write(key(1), b"x")
    open_storage("~/kv")
    assert (tmp_path / "kv" / "deep" / key(1)[:2]).is_dir()
    assert (tmp_path / "home" / "kv").is_dir()


@pytest.mark.parametrize(
    "url",
    ["s4://bucket", "redis+tls://host", "base://", "http.server://x", "os://", "", "disk://", "memory://x"],
)
def test_an_unknown_url_is_refused_and_never_becomes_a_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        open_storage(url)
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_lacks_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="redis"):
        open_storage("redis://host")


# --- disk: files ---


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskBackend]:
    backend = DiskBackend(tmp_path / "kv")
    yield backend
    backend.close()


def files(backend: DiskBackend) -> list[str]:
    """All files below the directory, but for the tables."""
    found = (path for path in backend.directory.rglob("*") if path.is_file())
    return sorted(str(p.relative_to(backend.directory)) for p in found if "sqlite" not in p.name)


def entry_path(backend: DiskBackend, name: str) -> Path:
    return backend.directory / name[:2] / f"{name}.safetensors"


def test_files_are_private(disk: DiskBackend) -> None:
    old = os.umask(0)
    try:
        other = DiskBackend(disk.directory.parent / "other")
        for backend in (disk, other):
            backend.write(key(1), b"x")
            backend.put_record(key(2), b"x")
            backend.write(key(3), b"x")
            backend.quarantine(key(3))
            backend.link("a", [key(1)])
    finally:
        os.umask(old)
    paths = [other.directory, *other.directory.rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert len(modes) == 9
    assert {n: oct(m) for n, m in modes.items() if m != (0o600 if "." in n else 0o700)} == {}
    other.close()


def test_the_file_is_named_after_the_key(disk: DiskBackend) -> None:
    disk.write(key(1), b"x")
    disk.put_record(key(2), b"y")
    assert files(disk) == sorted([f"{key(1)[:2]}/{key(1)}.safetensors", f"records/{key(2)}.json"])


def test_quarantine_keeps_the_evidence_and_delete_removes_it(disk: DiskBackend) -> None:
    disk.write(key(1), b"damaged")
    disk.quarantine(key(1))
    bad = entry_path(disk, key(1)).with_suffix(".safetensors.bad")
    assert bad.read_bytes() == b"damaged"
    assert disk.delete(key(1)) is False
    assert files(disk) == []  # the cache of an erased text is gone for good


def test_entries_outlive_the_backend(disk: DiskBackend) -> None:
    disk.write(key(1), b"x")
    disk.put_record(key(2), b"y")
    disk.link("a", [key(1)])
    disk.close()
    again = DiskBackend(disk.directory)
    assert list(again.keys()) == [key(1)]
    assert again.get_record(key(2)) == b"y"
    assert forget(again, "a") == [key(1)]
    again.close()


def test_foreign_files_are_not_entries(disk: DiskBackend) -> None:
    disk.write(key(1), b"x")
    folder = entry_path(disk, key(1)).parent
    for name in ("README.safetensors", f"{key(2)}.safetensors.bad", f"{key(2)}.txt", f"{key(2)[:-1]}.safetensors"):
        (folder / name).write_bytes(b"?")
    assert list(disk.keys()) == [key(1)]


def test_external_truncation_is_corruption(disk: DiskBackend) -> None:
    disk.write(key(1), bytes(200_000))
    with disk.open(key(1)) as reader:
        os.truncate(entry_path(disk, key(1)), 1000)
        assert len(reader.read(0, 1000)) == 1000
        with pytest.raises(CorruptChunkError):
            reader.read(0, 200_000)


def test_readers_leave_no_open_files(disk: DiskBackend) -> None:
    disk.write(key(1), b"x")
    before = len(os.listdir("/proc/self/fd"))
    readers = [disk.open(key(1)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    for reader in readers:
        reader.close()
        reader.close()
    dropped = disk.open(key(1))
    del dropped
    with pytest.raises(ChunkNotFoundError):
        disk.open(key(2))
    assert len(os.listdir("/proc/self/fd")) == before


# --- disk: a medium that refuses ---


def _full_disk(after: int) -> Callable[[int, memoryview], int]:
    """A write that accepts `after` bytes in short pieces and then has no space left, as a real full disk does."""
    room = after

    def write(fd: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(room, len(data), 700)
        room -= count
        return REAL_WRITE(fd, bytes(data[:count]))

    return write


REAL_WRITE = os.write


def test_short_writes_are_continued(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    monkeypatch.setattr(os, "write", _full_disk(10_000))
    disk.write(key(1), data)
    monkeypatch.undo()
    assert content(disk, key(1)) == data


@pytest.mark.parametrize("room", [0, 1, 5000, 9999])
def test_a_full_disk_leaves_nothing_behind(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    disk.write(key(1), b"old")
    before = files(disk)
    for put in (disk.write, disk.put_record):
        monkeypatch.setattr(os, "write", _full_disk(room))
        for name in (key(1), key(2)):
            with pytest.raises(OSError):
                put(name, bytes(10_000))
        monkeypatch.undo()
    assert content(disk, key(1)) == b"old"
    assert files(disk) == before


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_any_failing_step_leaves_nothing_behind(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    disk.write(key(1), b"old")
    before = files(disk)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError):
        disk.write(key(1), b"new")
    monkeypatch.undo()
    assert content(disk, key(1)) == b"old"
    assert files(disk) == before


def test_a_write_that_makes_no_progress_ends(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(OSError):
        disk.write(key(1), b"x")


def test_everything_is_synced_before_it_gets_its_name(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        events.append(f"fsync {kind}")
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        events.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    disk.write(key(1), b"x")
    first, events[:] = list(events), []
    disk.write(key(1), b"y")
    assert first == ["fsync directory", "fsync file", "replace", "fsync directory"]
    assert events == ["fsync file", "replace", "fsync directory"]


GARBAGE = {
    "text": b"this is no database" * 500,
    "bits": bytes(range(256)) * 64,
    "half": b"SQLite format 3\0" + bytes(90),
}


@pytest.mark.parametrize("content_of_it", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_document_table_is_set_aside(
    disk: DiskBackend, content_of_it: bytes, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk.write(key(1), b"x")
    disk.link("before", [key(1)])
    table = disk.directory / "documents.sqlite"
    if not is_open:
        disk.close()
    with table.open("r+b") as file:  # the same file, as a failing disk would have it
        file.write(content_of_it)
    assert content(disk, key(1)) == b"x"
    assert forget(disk, "before") == []
    disk.link("after", [key(1)])
    assert forget(disk, "after") == [key(1)]
    warnings = [r.message for r in caplog.records if "cannot be forgotten" in r.message]
    assert len(warnings) == 1 and str(table) in warnings[0] and "ingested again" in warnings[0]
    assert table.with_name("documents.sqlite.bad").read_bytes().startswith(content_of_it)
    assert stat.S_IMODE(table.stat().st_mode) == 0o600


def test_a_damaged_document_table_and_its_journal_are_set_aside_by_a_link(disk: DiskBackend) -> None:
    table = disk.directory / "documents.sqlite"
    table.write_bytes(b"this is no database" * 500)
    table.with_name("documents.sqlite-journal").write_bytes(b"rolled back into the new table, this would spoil it")
    disk.link("a", iter([key(1), key(2)]))
    assert not table.with_name("documents.sqlite-journal").exists()
    assert forget(disk, "a") == sorted([key(1), key(2)])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_document_table_that_is_no_file(disk: DiskBackend, make: Callable[[Path], None]) -> None:
    make(disk.directory / "documents.sqlite")
    disk.link("a", [key(1)])
    assert forget(disk, "a") == [key(1)]


def test_many_processes_meet_a_damaged_document_table(tmp_path: Path) -> None:
    for turn in range(5):
        directory = tmp_path / str(turn)
        directory.mkdir()
        (directory / "documents.sqlite").write_bytes(b"this is no database" * 500)

        def work(i: int, directory: Path = directory) -> None:
            backend = DiskBackend(directory)
            backend.link("doc", [key(i)])
            backend.close()

        pids = [in_child(lambda i=i: work(i)) for i in range(6)]  # type: ignore[misc]
        assert [status_of(pid) for pid in pids] == [0] * 6
        backend = DiskBackend(directory)
        assert forget(backend, "doc") == sorted(key(i) for i in range(6))
        backend.close()


def test_on_a_full_disk_links_are_read_but_not_removed(disk: DiskBackend) -> None:
    """Erasing frees space; it must not need any before it has begun."""
    disk.write(key(1), b"x")
    disk.link("a", [key(1)])
    disk.close()

    def on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        backend = DiskBackend(disk.directory)
        assert backend.needed_only_by({"a"}) == [key(1)]
        assert backend.delete(key(1))
        with pytest.raises(OSError, match="documents"):
            backend.unlink({"a"})

    assert status_of(in_child(on_a_full_disk)) == 0
    assert list(disk.keys()) == []
    assert forget(disk, "a") == [key(1)]


def test_a_removed_directory_is_made_again(disk: DiskBackend) -> None:
    def use(i: int) -> None:
        disk.put_record(key(i), b"record")
        disk.link("a", [key(i)])
        disk.write(key(i), b"entry")

    use(1)
    shutil.rmtree(disk.directory)
    assert forget(disk, "a") == [] == list(disk.keys()) == list(disk.records())
    assert disk.get_record(key(1)) is None
    assert not disk.directory.exists()
    for act in (
        lambda: disk.put_record(key(2), b"record"),
        lambda: disk.link("a", [key(2)]),
        lambda: disk.write(key(2), b"entry"),
    ):
        shutil.rmtree(disk.directory, ignore_errors=True)
        act()
        assert stat.S_IMODE(disk.directory.stat().st_mode) == 0o700
    use(2)
    assert list(disk.keys()) == list(disk.records()) == forget(disk, "a") == [key(2)]


def test_a_document_table_that_others_made_again_is_used(disk: DiskBackend) -> None:
    disk.link("a", [key(1)])
    shutil.rmtree(disk.directory)
    other = DiskBackend(disk.directory)
    other.link("b", [key(2)])
    for _ in range(2):
        disk.link("a", [key(3)])
    assert forget(disk, "a") == [key(3)]
    assert forget(disk, "b") == [key(2)]
    assert forget(other, "b") == []
    other.close()


# --- disk: what is no file ---


@pytest.fixture(params=["fifo", "directory", "full directory"])
def obstacle(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Puts something that is no file at a path."""

    def put(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
        if request.param == "full directory":
            (path / "somebody's").write_text("own")

    return put


def test_an_obstacle_is_no_entry(disk: DiskBackend, obstacle: Callable[[Path], None]) -> None:
    disk.write(key(1), b"x")  # from now on the index is open
    disk.delete(key(1))
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(2):
        obstacle(entry_path(disk, key(1)))
        with pytest.raises(CorruptChunkError, match="not a regular file"):
            disk.open(key(1))
        disk.write(key(1), b"x")
        assert content(disk, key(1)) == b"x"
        assert disk.delete(key(1)) is True
        obstacle(entry_path(disk, key(1)))
        disk.delete(key(1))
        assert list(disk.keys()) == [], turn
        obstacle(entry_path(disk, key(1)))
        disk.quarantine(key(1))
        disk.write(key(1), b"x")
        assert disk.delete(key(1)) is True
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_obstacle_is_no_record(disk: DiskBackend, obstacle: Callable[[Path], None]) -> None:
    path = disk.directory / "records" / f"{key(1)}.json"
    for _ in range(2):
        obstacle(path)
        assert list(disk.records()) == []
        with pytest.raises(OSError, match="not a regular file"):
            disk.get_record(key(1))
        disk.put_record(key(1), b"x")
        disk.put_record(key(1), b"y")
        assert disk.get_record(key(1)) == b"x"
        disk.delete_record(key(1))
        obstacle(path)
        disk.delete_record(key(1))
        assert disk.get_record(key(1)) is None


def test_a_failing_link_changes_nothing(disk: DiskBackend) -> None:
    def keys() -> Iterator[str]:
        yield key(1)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        disk.link("a", keys())
    assert forget(disk, "a") == []


# --- disk: other processes ---


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_write(written: int) -> None:
    def write(fd: int, data: memoryview) -> int:
        if written:
            REAL_WRITE(fd, bytes(data[:written]))
        die()
        return 0

    os.write = write


def _die_around(call: str, after: bool) -> None:
    real = getattr(os, call)

    def wrapped(*args: object, **kwargs: object) -> None:
        if after:
            real(*args, **kwargs)
        die()

    setattr(os, call, wrapped)


STEPS: dict[str, tuple[Callable[[], None], bytes]] = {
    "before the write": (lambda: _die_in_write(0), b"old"),
    "in mid-write": (lambda: _die_in_write(50_000), b"old"),
    "before fsync": (lambda: _die_around("fsync", after=False), b"old"),
    "after fsync": (lambda: _die_around("fsync", after=True), b"old"),
    "before rename": (lambda: _die_around("replace", after=False), b"old"),
    "after rename": (lambda: _die_around("replace", after=True), b"new"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_writer_leaves_the_old_or_the_new_entry(disk: DiskBackend, step: str) -> None:
    sabotage, expected = STEPS[step]
    versions = {b"old": b"o" * 100_000, b"new": b"n" * 100_000}
    for i in range(3):
        disk.write(key(i), versions[b"old"])

        def write(name: str = key(i)) -> None:
            backend = DiskBackend(disk.directory)
            sabotage()
            backend.write(name, versions[b"new"])

        assert status_of(in_child(write)) == -signal.SIGKILL
        assert content(disk, key(i)) == versions[expected]
    left = [name for name in files(disk) if name.endswith(".tmp")]
    assert len(left) == (0 if expected == b"new" else 3)
    assert sorted(disk.keys()) == sorted(key(i) for i in range(3))

    DiskBackend(disk.directory).close()  # young temps stay: their writer may be in another container
    assert [name for name in files(disk) if name.endswith(".tmp")] == left
    for name in left:
        os.utime(disk.directory / name, (time.time() - 7200,) * 2)
    DiskBackend(disk.directory).close()
    assert len(files(disk)) == 3
    disk.write(key(0), b"written again")
    assert content(disk, key(0)) == b"written again"


def test_writers_killed_at_any_moment(disk: DiskBackend) -> None:
    versions = [bytes([i]) * 30_000 for i in range(8)]
    disk.write(key(1), versions[0])
    for round_ in range(50):
        i = round_ % 6
        started, at = os.pipe()

        def write(i: int = i, at: int = at) -> None:
            backend = DiskBackend(disk.directory)
            REAL_WRITE(at, b"!")
            while True:
                for version in versions[i : i + 2]:
                    backend.write(key(1), version)

        pid = in_child(write)
        assert os.read(started, 1) == b"!"
        seen = {content(disk, key(1)) for _ in range(20 + 30 * i)}
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
        assert seen | {content(disk, key(1))} <= set(versions)
        os.close(started)
        os.close(at)


def test_a_killed_writer_of_a_record_leaves_no_half_of_it(disk: DiskBackend) -> None:
    def put() -> None:
        _die_in_write(3)
        disk.put_record(key(1), b"whole record")

    assert status_of(in_child(put)) == -signal.SIGKILL
    assert disk.get_record(key(1)) is None
    disk.put_record(key(1), b"whole record")
    assert disk.get_record(key(1)) == b"whole record"


def test_the_sweep_takes_old_temps_of_dead_writers_only(disk: DiskBackend) -> None:
    disk.write(key(1), b"x")
    disk.put_record(key(2), b"y")
    dead, folder = dead_pid(), entry_path(disk, key(1)).parent
    kept = {
        "of a living process": folder / f"{key(1)}.safetensors.{os.getpid()}.0011aabb.tmp",
        "of process 1": folder / f"{key(1)}.safetensors.1.0011aabb.tmp",
        "not ours": folder / "x.tmp",
        "not ours either": folder / "notes.2024.draft.tmp",
        "no pid": folder / f"{key(1)}.safetensors.0.0011aabb.tmp",
        "huge pid": folder / f"{key(1)}.safetensors.99999999999999999999.0011aabb.tmp",
    }
    swept = [
        folder / f"{key(1)}.safetensors.{dead}.0011aabb.tmp",
        disk.directory / "records" / f"{key(2)}.json.{dead}.0011aabb.tmp",
    ]
    for path in [*kept.values(), *swept]:
        path.write_bytes(b"?")
        os.utime(path, (time.time() - 7200,) * 2)
    young = folder / f"{key(1)}.safetensors.{dead}.ccddeeff.tmp"
    young.write_bytes(b"?")
    DiskBackend(disk.directory).close()
    assert [path for path in swept if path.exists()] == []
    assert [what for what, path in kept.items() if not path.exists()] == []
    assert young.exists()
    assert list(disk.keys()) == [key(1)]


def test_two_processes_write_one_key(disk: DiskBackend) -> None:
    versions = [b"a" * 80_000, b"b" * 80_000]

    def write(version: bytes) -> None:
        backend = DiskBackend(disk.directory)
        for _ in range(20):
            backend.write(key(1), version)

    pids = [in_child(lambda v=version: write(v)) for version in versions]  # type: ignore[misc]
    seen = set()
    while len(pids) > sum(1 for pid in pids if _has_ended(pid)):
        try:
            seen.add(content(disk, key(1)))
        except ChunkNotFoundError:
            assert not seen
    assert [status_of(pid) for pid in pids] == [0, 0]
    assert seen | {content(disk, key(1))} <= set(versions)
    assert files(disk) == [f"{key(1)[:2]}/{key(1)}.safetensors"]


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_of_many_processes_the_first_record_wins(disk: DiskBackend) -> None:
    go, start = os.pipe()

    def put(i: int) -> None:
        backend = DiskBackend(disk.directory)
        os.read(go, 1)
        backend.put_record(key(1), bytes([i]) * 1000)
        won = backend.get_record(key(1))
        backend.write(key(f"seen {i}"), won or b"")

    pids = [in_child(lambda i=i: put(i)) for i in range(6)]  # type: ignore[misc]
    REAL_WRITE(start, b"." * 6)
    assert [status_of(pid) for pid in pids] == [0] * 6
    seen = {content(disk, key(f"seen {i}")) for i in range(6)}
    assert seen == {disk.get_record(key(1))}
    os.close(go)
    os.close(start)


def test_documents_are_shared_by_processes(disk: DiskBackend) -> None:
    disk.link("before", [key("shared")])  # so the table is open here when the others fork

    def link(i: int) -> None:
        disk.link("joint", [key(i)])  # through the inherited object as well
        backend = DiskBackend(disk.directory)
        backend.link(f"own {i}", [key(("own", i)), key("shared")])
        backend.close()

    pids = [in_child(lambda i=i: link(i)) for i in range(8)]  # type: ignore[misc]
    assert [status_of(pid) for pid in pids] == [0] * 8
    assert forget(disk, "joint") == sorted(key(i) for i in range(8))
    for i in range(8):
        assert forget(disk, f"own {i}") == [key(("own", i))]

    def unlink() -> None:
        assert forget(disk, "before") == [key("shared")]

    assert status_of(in_child(unlink)) == 0
    assert forget(disk, "before") == []


def test_many_processes_may_open_a_new_directory_at_once(tmp_path: Path) -> None:
    for turn in range(5):
        directory = tmp_path / str(turn)

        def work(i: int, directory: Path = directory) -> None:
            backend = DiskBackend(directory)
            backend.link("doc", [key(i)])
            backend.write(key(i), b"x")
            backend.close()

        pids = [in_child(lambda i=i: work(i)) for i in range(6)]  # type: ignore[misc]
        assert [status_of(pid) for pid in pids] == [0] * 6
        backend = DiskBackend(directory)
        assert forget(backend, "doc") == sorted(backend.keys()) == sorted(key(i) for i in range(6))
        backend.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without rights")
def test_a_read_only_directory_can_be_read() -> None:
    with tempfile.TemporaryDirectory() as directory:  # below /tmp: pytest's own directories are closed to others
        backend = DiskBackend(f"{directory}/kv")
        backend.write(key(1), b"x")
        backend.put_record(key(2), b"y")
        for path in [backend.directory.parent, backend.directory, *backend.directory.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

        def read() -> None:
            os.setuid(65534)
            other = DiskBackend(backend.directory)
            assert list(other.keys()) == [key(1)]
            assert content(other, key(1)) == b"x"
            assert other.get_record(key(2)) == b"y"
            other.quarantine(key(1))
            assert content(other, key(1)) == b"x"
            for use in (
                lambda: other.write(key(3), b"z"),
                lambda: other.delete(key(1)),
                lambda: other.put_record(key(3), b"z"),
                lambda: other.link("a", [key(1)]),
            ):
                with pytest.raises(OSError):
                    use()
            other.close()

        assert status_of(in_child(read)) == 0
