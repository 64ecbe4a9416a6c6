"""The index of the disk backend: quick when it is there, not missed when it is not."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.storage import content, forget, key
from processes import in_child, status_of

from rag_blend.errors import ChunkNotFoundError
from rag_blend.storage.disk import DiskBackend


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskBackend]:
    """Five labelled entries, and a document that needs the first."""
    backend = DiskBackend(tmp_path / "kv")
    for i in range(5):
        backend.write(key(i), b"entry %d" % i, label(i))
    backend.link("document", [key(0)])
    yield backend
    backend.close()


def label(name: object) -> bytes:
    return f"label of {name} ".encode() * 100


def labels_of(backend: DiskBackend) -> dict[str, bytes]:
    listed = list(backend.labels())
    assert len(listed) == len(dict(listed)), "an entry is listed twice"
    return dict(listed)


def index_of(backend: DiskBackend) -> Path:
    return backend.directory / "index.sqlite"


def entry_path(backend: DiskBackend, name: object) -> Path:
    return backend.directory / key(name)[:2] / f"{key(name)}.safetensors"


ALL = {key(i): label(i) for i in range(5)}


# --- labels ---


def test_labels_outlive_the_backend(disk: DiskBackend) -> None:
    assert labels_of(disk) == ALL
    disk.close()
    again = DiskBackend(disk.directory)
    assert labels_of(again) == ALL
    again.close()


def test_every_process_sees_them(disk: DiskBackend) -> None:
    def write() -> None:
        other = DiskBackend(disk.directory)
        assert labels_of(other) == ALL
        other.write(key(5), b"new", label(5))
        other.write(key(4), b"replaced", b"other label")
        other.delete(key(0))

    assert status_of(in_child(write)) == 0
    assert labels_of(disk) == {**{key(i): label(i) for i in (1, 2, 3, 5)}, key(4): b"other label"}


def test_each_entry_is_listed_once_though_all_are_written_again_meanwhile(
    disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_blend.storage._index._LABELS_AT_ONCE", 2)
    listed = []
    for name, said in disk.labels():
        listed.append((name, said))
        if len(listed) == 1:
            for i in reversed(range(5)):
                disk.write(key(i), b"entry %d" % i, label(i))
    assert len(listed) == 5 and dict(listed) == ALL


def test_the_label_of_a_file_that_changed_is_not_known(disk: DiskBackend) -> None:
    entry_path(disk, 0).write_bytes(b"entry 9")  # of the same size
    os.truncate(entry_path(disk, 1), 3)
    entry_path(disk, 2).unlink()
    entry_path(disk, 3).unlink()
    entry_path(disk, 3).mkdir()
    shutil.copy2(entry_path(disk, 4), entry_path(disk, 4).with_name("kept"))
    os.replace(entry_path(disk, 4).with_name("kept"), entry_path(disk, 4))  # restored by hand, date and all
    expected = {key(0): b"", key(1): b"", key(3): b"", key(4): label(4)}
    for _ in range(2):
        assert labels_of(disk) == expected
        assert (disk.stats().entries, disk.stats().bytes) == (3, 7 + 3 + 7)
    disk.write(key(0), b"entry 0", label(0))
    assert labels_of(disk) == {**expected, key(0): label(0)}


def test_files_added_by_hand_are_listed(disk: DiskBackend) -> None:
    for name in ("x", "y"):
        entry_path(disk, name).parent.mkdir(exist_ok=True)
        entry_path(disk, name).write_bytes(b"by hand")
    wrong_folder = disk.directory / "zz" / f"{key('z')}.safetensors"
    wrong_folder.parent.mkdir()
    wrong_folder.write_bytes(b"not where it belongs")
    assert labels_of(disk) == {**ALL, key("x"): b"", key("y"): b""}
    assert disk.stats().entries == 7


def test_nothing_of_an_erased_text_stays_in_the_index(disk: DiskBackend) -> None:
    disk.write(key("secret"), b"data", b"the secret text" * 100)
    assert b"the secret text" in index_of(disk).read_bytes()
    disk.delete(key("secret"))
    for path in disk.directory.rglob("*"):
        assert path.is_dir() or b"the secret text" not in path.read_bytes(), path


def _fill(directory: Path, number: int) -> DiskBackend:
    """Many labelled entries; written directly, without waiting for the disk."""
    names = [key(i) for i in range(number)]
    for folder in {name[:2] for name in names}:
        (directory / folder).mkdir()
    for name in names:
        (directory / name[:2] / f"{name}.safetensors").write_bytes(b"x")
    backend = DiskBackend(directory)
    rows = [(f"{name}.safetensors", bytes(2300)) for name in names]
    with contextlib.closing(sqlite3.connect(directory / "index.sqlite")) as db, db:
        db.executemany("INSERT INTO labels VALUES (?, ?)", rows)
    return backend


def _seconds(work: Callable[[], object], turns: int = 3) -> float:
    """Seconds of CPU time that it takes at best: other work on the machine must not matter."""
    spent = []
    for _ in range(turns):
        before = time.process_time()
        work()
        spent.append(time.process_time() - before)
    return min(spent)


def test_ten_thousand_entries_are_listed_at_once(tmp_path: Path) -> None:
    _fill(tmp_path, 10_000).close()
    assert _seconds(lambda: DiskBackend(tmp_path).close()) < 0.5
    disk = DiskBackend(tmp_path)
    listed: dict[str, bytes] = {}
    assert _seconds(lambda: listed.update(disk.labels())) < 0.5
    assert len(listed) == 10_000 and set(listed.values()) == {bytes(2300)}
    assert _seconds(disk.stats) < 0.5
    assert (disk.stats().entries, disk.stats().bytes) == (10_000, 10_000)
    disk.close()
    (tmp_path / "index.sqlite").unlink()
    assert _seconds(lambda: DiskBackend(tmp_path).close(), turns=1) < 2.0  # the index is made again


def test_the_number_of_open_files_does_not_grow(disk: DiskBackend) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        disk.write(key(i), b"x", label(i))
        content(disk, key(i))
        labels_of(disk)
        disk.quarantine(key(i))
    assert len(os.listdir("/proc/self/fd")) == before


# --- an index that is lost or damaged ---


def _delete(index: Path) -> None:
    index.unlink()


def _garble(index: Path) -> None:
    with index.open("r+b") as file:  # the same file, as a failing disk would have it
        file.write(b"this is no database" * 500)


def _garble_behind_the_header(index: Path) -> None:
    with index.open("r+b") as file:
        file.seek(200)
        file.write(bytes(range(256)) * (index.stat().st_size // 256 - 1))


def _cut_in_half(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def _empty(index: Path) -> None:
    os.truncate(index, 0)


def _replace_by_directory(index: Path) -> None:
    index.unlink()
    index.mkdir()


def _replace_by_fifo(index: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def _of_a_later_version(index: Path) -> None:
    with contextlib.closing(sqlite3.connect(index)) as db, db:
        db.execute("DROP TABLE files")
        db.execute("CREATE TABLE files (other TEXT)")
        db.execute("PRAGMA user_version = 99")


def _without_a_table(index: Path) -> None:
    with contextlib.closing(sqlite3.connect(index)) as db, db:
        db.execute("DROP TABLE labels")


def _with_a_foreign_row(index: Path) -> None:
    with contextlib.closing(sqlite3.connect(index)) as db, db:
        db.execute("INSERT INTO files VALUES ('../../elsewhere', 'entry', 1, 1, -1)")


DAMAGE = [
    _delete, _garble, _garble_behind_the_header, _cut_in_half, _empty, _replace_by_directory, _replace_by_fifo,
    _of_a_later_version, _without_a_table, _with_a_foreign_row,
]  # fmt: skip


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "at start"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lost_index_is_made_from_the_files(
    disk: DiskBackend, damage: Callable[[Path], None], is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_open:
        disk.close()
    damage(index_of(disk))
    backend = disk if is_open else DiskBackend(disk.directory)
    for i in range(5):
        assert content(backend, key(i)) == b"entry %d" % i
    listed = labels_of(backend)
    assert set(listed) == set(ALL)
    assert all(found in (b"", ALL[name]) for name, found in listed.items())
    assert (backend.stats().entries, backend.stats().bytes) == (5, 35)
    backend.write(key(0), b"again", label("again"))
    backend.quarantine(key(1))
    assert backend.delete(key(2)) is True
    assert labels_of(backend)[key(0)] == label("again")
    assert set(labels_of(backend)) == {key(0), key(3), key(4)}
    assert forget(backend, "document") == [key(0)]  # which document needs what is not lost with it
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
    assert stat.S_IMODE(index_of(disk).stat().st_mode) == 0o600
    backend.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_write_is_what_meets_it_first(disk: DiskBackend, damage: Callable[[Path], None]) -> None:
    damage(index_of(disk))
    disk.write(key(5), b"new", label(5))
    assert labels_of(disk)[key(5)] == label(5)
    assert (disk.stats().entries, disk.stats().bytes) == (6, 38)


def test_the_quota_is_kept_after_a_loss(tmp_path: Path) -> None:
    disk = DiskBackend(tmp_path, quota_bytes=1000)
    for damage in (_delete, _garble, _empty):
        for i in range(12):
            disk.write(key((damage.__name__, i)), bytes(100))
        damage(index_of(disk))
        disk.write(key((damage.__name__, "last")), bytes(100))
        assert disk.stats().bytes == 1000
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) == 1000
    disk.close()


def test_an_index_never_leads_outside(tmp_path: Path) -> None:
    disk = DiskBackend(tmp_path / "kv", quota_bytes=100)
    disk.write(key(1), bytes(100))
    victims = [tmp_path / "victim", tmp_path / "kv" / "victim", tmp_path / "kv" / "vi" / "victim"]
    victims[-1].parent.mkdir()
    for victim in victims:
        victim.write_bytes(bytes(100))
    with contextlib.closing(sqlite3.connect(index_of(disk))) as db, db:
        for name in ("../victim", str(victims[0]), "../../victim", "victim", "..", ""):
            db.execute("INSERT INTO files VALUES (?, 'entry', 100, 1, -1)", (name,))
    disk.write(key(2), bytes(100))
    assert list(disk.keys()) == [key(2)]
    assert all(victim.exists() for victim in victims)
    disk.close()


def test_processes_that_meet_a_damaged_index_all_go_on(tmp_path: Path) -> None:
    for turn in range(4):
        directory = tmp_path / str(turn)
        DiskBackend(directory).write(key("first"), b"x", label("first"))
        _garble(directory / "index.sqlite")

        def work(i: int, directory: Path = directory) -> None:
            backend = DiskBackend(directory)
            backend.write(key(i), b"x", label(i))
            assert key(i) in labels_of(backend)
            backend.close()

        pids = [in_child(lambda i=i: work(i)) for i in range(6)]  # type: ignore[misc]
        assert [status_of(pid) for pid in pids] == [0] * 6
        backend = DiskBackend(directory)
        assert set(labels_of(backend)) == {key("first"), *(key(i) for i in range(6))}
        backend.close()


# --- an index that cannot be written ---


def _answers_read_only(directory: Path, expected: dict[str, bytes]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("rag_blend").addHandler(handler)
    disk = DiskBackend(directory)
    for _ in range(2):
        assert labels_of(disk) == expected
        assert set(disk.keys()) == set(ALL)
        assert (disk.stats().entries, disk.stats().bytes) == (5, 35)
    for _ in range(300):  # more than are remembered before they are written down
        assert content(disk, key(1)) == b"entry 1"
    disk.quarantine(key(1))
    for refused in (lambda: disk.write(key(9), b"x"), lambda: disk.delete(key(1))):
        with pytest.raises(OSError):
            refused()
    disk.close()
    assert [r.levelno for r in records if r.levelno >= logging.WARNING] == [logging.WARNING]
    assert "cannot be written" in records[0].getMessage()


def _as_it_is(index: Path) -> None:
    pass


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without rights")
@pytest.mark.parametrize("damage", [_as_it_is, _delete, _garble, _of_a_later_version])
@pytest.mark.parametrize("mode", [0o644, 0o600], ids=["readable", "unreadable"])
def test_a_read_only_directory_answers_with_one_warning(damage: Callable[[Path], None], mode: int) -> None:
    with tempfile.TemporaryDirectory() as directory:  # below /tmp: pytest's own directories are closed to others
        disk = DiskBackend(f"{directory}/kv")
        for i in range(5):
            disk.write(key(i), b"entry %d" % i, label(i))
        disk.close()
        entry_path(disk, 0).write_bytes(b"changed")
        damage(index_of(disk))
        for path in [disk.directory.parent, disk.directory, *disk.directory.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else mode if path == index_of(disk) else 0o644)
        known = damage is _as_it_is and mode == 0o644
        expected = {**ALL, key(0): b""} if known else dict.fromkeys(ALL, b"")

        def read() -> None:
            os.setuid(65534)
            _answers_read_only(disk.directory, expected)

        assert status_of(in_child(read)) == 0


def test_an_index_that_is_held_up_holds_up_no_query(disk: DiskBackend) -> None:
    holder = sqlite3.connect(index_of(disk), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    disk._index.patience = 0.1
    before = time.monotonic()
    for _ in range(300):
        content(disk, key(0))
    disk.quarantine(key(1))
    assert key(1) not in disk
    assert set(labels_of(disk)) == {key(i) for i in (0, 2, 3, 4)}
    assert set(labels_of(disk).values()) == {b""}
    with pytest.raises(TimeoutError, match=r"index\.sqlite"):
        disk.write(key(0), b"refused", label(0))
    assert content(disk, key(0)) == b"entry 0"
    assert disk.delete(key(2)) is True
    assert time.monotonic() - before < 10
    holder.execute("ROLLBACK")
    holder.close()
    assert labels_of(disk) == {key(i): label(i) for i in (0, 3, 4)}
    disk.write(key(0), b"written", label(0))
    assert [path.name for path in disk.directory.glob("*/*.tmp")] == []


def test_reading_writes_to_the_index_now_and_then_only(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions: list[str] = []
    real = disk._index.run

    def run(begin: str, *rest: object) -> object:
        transactions.append(begin)
        return real(begin, *rest)

    monkeypatch.setattr(disk._index, "run", run)
    for _ in range(1000):
        disk.open(key(1)).close()
        with contextlib.suppress(ChunkNotFoundError):
            disk.open(key("missing"))
    assert transactions == ["BEGIN IMMEDIATE"] * 3


# --- threads and forks ---


def test_an_open_backend_can_be_forked(disk: DiskBackend) -> None:
    reader = disk.open(key(0))

    def use(i: int) -> None:
        assert labels_of(disk).items() >= ALL.items()
        assert reader.read(0, 7).tobytes() == b"entry 0"
        disk.write(key(("child", i)), b"x", label(i))
        disk.close()

    for _ in range(2):
        pids = [in_child(lambda i=i: use(i)) for i in range(4)]  # type: ignore[misc]
        assert [status_of(pid) for pid in pids] == [0] * 4
    disk.write(key(5), b"x", label(5))
    assert labels_of(disk) == {**ALL, key(5): label(5), **{key(("child", i)): label(i) for i in range(4)}}
    reader.close()


def test_a_fork_while_another_thread_uses_the_index(disk: DiskBackend) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(db: sqlite3.Connection) -> None:
        inside.set()
        go_on.wait(30)

    thread = threading.Thread(target=lambda: disk._index.run("BEGIN", hold))
    thread.start()
    assert inside.wait(30)

    def use() -> None:
        assert labels_of(disk) == ALL
        os._exit(0)

    pid = in_child(use)
    until = time.monotonic() + 20
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01)
        if time.monotonic() > until:  # it waits for a lock that nobody will release
            os.kill(pid, signal.SIGKILL)
    go_on.set()
    thread.join()
    assert status_of(pid) == 0


def test_threads_share_it(disk: DiskBackend) -> None:
    wrong: list[BaseException] = []

    def use(worker: int) -> None:
        try:
            for i in range(15):
                name = key((worker, i))
                disk.write(name, b"x" * (i + 1), label((worker, i)))
                assert content(disk, name) == b"x" * (i + 1)
                assert dict(disk.labels())[name] == label((worker, i))
                if i % 3 == 0:
                    assert disk.delete(name)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert labels_of(disk) == {**ALL, **{key((w, i)): label((w, i)) for w in range(4) for i in range(15) if i % 3}}
