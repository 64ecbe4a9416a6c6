"""What every storage backend must do. Subclass it and give it a `backend` fixture with an empty backend:

class TestMyBackend(StorageContract):
    @pytest.fixture
    def backend(self):
        backend = MyBackend(...)
        yield backend
        backend.close()
"""

from __future__ import annotations

import hashlib
import threading

import pytest

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import StorageBackend

NOT_KEYS = ("", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", "../" + "a" * 61, "a/" * 32, "\0" * 64, "..")


def key(name: object) -> str:
    """A key (or record name) for a test."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def content(backend: StorageBackend, name: str) -> bytes:
    """A whole entry."""
    with backend.open(name) as reader:
        return reader.read(0, reader.size).tobytes()


def forget(backend: StorageBackend, *documents: str) -> list[str]:
    """What only these documents need, which is then unlinked."""
    keys = backend.needed_only_by(set(documents))
    backend.unlink(set(documents))
    return keys


class StorageContract:
    """Inherit, and define the fixture `backend`."""

    # --- entries ---

    def test_written_bytes_come_back(self, backend: StorageBackend) -> None:
        data = bytes(range(256)) * 40
        backend.write(key(1), data)
        with backend.open(key(1)) as reader:
            assert reader.size == len(data)
            assert reader.read(0, len(data)).tobytes() == data
            assert reader.read(100, 7).tobytes() == data[100:107]
            assert reader.read(len(data) - 1, 1).tobytes() == data[-1:]
            assert reader.read(5, 0).tobytes() == b""
        assert key(1) in backend

    def test_an_entry_may_be_empty(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"")
        assert content(backend, key(1)) == b""

    def test_a_missing_entry_is_not_found(self, backend: StorageBackend) -> None:
        with pytest.raises(ChunkNotFoundError):
            backend.open(key(1))
        assert key(1) not in backend
        assert list(backend.keys()) == []
        assert backend.delete(key(1)) is False
        backend.quarantine(key(1))

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (2**40, 1), (11, 4)])
    def test_reading_past_the_end_is_corruption(self, backend: StorageBackend, offset: int, length: int) -> None:
        backend.write(key(1), b"0123456789")
        with backend.open(key(1)) as reader, pytest.raises(CorruptChunkError):
            reader.read(offset, length)

    def test_a_second_write_replaces_the_first(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"old and long")
        backend.write(key(1), b"new")
        assert content(backend, key(1)) == b"new"
        assert list(backend.keys()) == [key(1)]

    def test_the_writer_may_reuse_its_buffer(self, backend: StorageBackend) -> None:
        data = bytearray(b"written")
        backend.write(key(1), data)  # type: ignore[arg-type]
        data[:] = b"changed"
        assert content(backend, key(1)) == b"written"

    def test_keys_are_the_entries_present(self, backend: StorageBackend) -> None:
        for i in range(5):
            backend.write(key(i), b"x")
        backend.put_record(key(100), b"no entry")
        backend.link("doc", [key(101)])
        backend.delete(key(0))
        backend.quarantine(key(1))
        assert sorted(backend.keys()) == sorted(key(i) for i in (2, 3, 4))

    def test_a_label_comes_back_or_is_lost(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"one", b"first label")
        backend.write(key(2), b"two", bytes(range(256)))
        backend.write(key(3), b"three")
        backend.write(key(1), b"one again", b"second label")
        backend.delete(key(2))
        labels = dict(backend.labels())
        assert set(labels) == {key(1), key(3)}
        assert labels[key(1)] in (b"second label", b"")
        assert labels[key(3)] == b""

    def test_stats_count_what_is_there(self, backend: StorageBackend) -> None:
        assert (backend.stats().entries, backend.stats().bytes) == (0, 0)
        backend.write(key(1), b"12345")
        backend.write(key(2), b"123")
        backend.write(key(1), b"1234567")
        backend.put_record(key(3), b"no entry")
        assert (backend.stats().entries, backend.stats().bytes) == (2, 10)
        backend.delete(key(1))
        assert (backend.stats().entries, backend.stats().bytes) == (1, 3)

    def test_calls_can_be_limited(self, backend: StorageBackend) -> None:
        backend.limit_calls(5.0)
        backend.write(key(1), b"x")
        assert content(backend, key(1)) == b"x"

    def test_delete_removes_one_entry(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"one")
        backend.write(key(2), b"two")
        assert backend.delete(key(1)) is True
        assert backend.delete(key(1)) is False
        assert key(1) not in backend
        assert content(backend, key(2)) == b"two"

    def test_a_reader_survives_delete_replacement_and_quarantine(self, backend: StorageBackend) -> None:
        for act in (backend.delete, backend.quarantine, lambda k: backend.write(k, b"other")):
            backend.write(key(1), b"0123456789")
            with backend.open(key(1)) as reader:
                act(key(1))
                assert reader.read(0, 10).tobytes() == b"0123456789"

    def test_a_quarantined_entry_is_gone_and_can_be_written_anew(self, backend: StorageBackend) -> None:
        for data in (b"bad", b"bad again"):
            backend.write(key(1), data)
            backend.quarantine(key(1))
            assert key(1) not in backend
        backend.write(key(1), b"good")
        assert content(backend, key(1)) == b"good"

    @pytest.mark.parametrize("name", NOT_KEYS)
    def test_what_is_not_a_key_is_refused(self, backend: StorageBackend, name: str) -> None:
        for use in (
            lambda: backend.write(name, b"x"),
            lambda: backend.open(name),
            lambda: backend.delete(name),
            lambda: backend.quarantine(name),
            lambda: backend.put_record(name, b"x"),
            lambda: backend.get_record(name),
            lambda: backend.delete_record(name),
        ):
            with pytest.raises(ValueError):
                use()
        assert list(backend.keys()) == []

    def test_threads_see_whole_entries_only(self, backend: StorageBackend) -> None:
        versions = [bytes([i]) * 50_000 for i in range(4)]
        backend.write(key(1), versions[0])
        wrong: list[object] = []
        done = threading.Event()

        def write(version: bytes) -> None:
            for _ in range(15):
                backend.write(key(1), version)

        def read() -> None:
            while not done.is_set():
                try:
                    if content(backend, key(1)) not in versions:
                        wrong.append("torn")
                except Exception as error:
                    wrong.append(error)

        reader = threading.Thread(target=read)
        writers = [threading.Thread(target=write, args=(version,)) for version in versions]
        reader.start()
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        reader.join()
        assert wrong == []
        assert content(backend, key(1)) in versions

    # --- records ---

    def test_the_first_record_wins(self, backend: StorageBackend) -> None:
        assert backend.get_record(key(1)) is None
        backend.put_record(key(1), b"first")
        backend.put_record(key(1), b"second")
        assert backend.get_record(key(1)) == b"first"

    def test_a_deleted_record_can_be_written_anew(self, backend: StorageBackend) -> None:
        backend.put_record(key(1), b"first")
        backend.put_record(key(2), b"other")
        backend.delete_record(key(1))
        backend.delete_record(key(1))
        assert backend.get_record(key(1)) is None
        assert backend.get_record(key(2)) == b"other"
        backend.put_record(key(1), b"second")
        assert backend.get_record(key(1)) == b"second"

    def test_records_are_listed(self, backend: StorageBackend) -> None:
        assert list(backend.records()) == []
        backend.write(key(0), b"no record")
        for i in range(1, 4):
            backend.put_record(key(i), b"x")
        backend.delete_record(key(1))
        assert sorted(backend.records()) == sorted([key(2), key(3)])
        for name in backend.records():  # they may be deleted on the way
            backend.delete_record(name)
        assert list(backend.records()) == []

    def test_entries_and_records_do_not_meet(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"entry")
        assert backend.get_record(key(1)) is None
        backend.put_record(key(1), b"record")
        backend.delete(key(1))
        assert backend.get_record(key(1)) == b"record"

    def test_of_many_writers_of_a_record_one_wins_for_all(self, backend: StorageBackend) -> None:
        barrier = threading.Barrier(8)
        seen: list[bytes | None] = []

        def put(i: int) -> None:
            barrier.wait()
            backend.put_record(key(1), bytes([i]))
            seen.append(backend.get_record(key(1)))

        threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 8
        assert set(seen) == {backend.get_record(key(1))}

    # --- documents ---

    def test_what_no_other_document_needs(self, backend: StorageBackend) -> None:
        backend.link("a", [key(1), key(2)])
        backend.link("b", [key(2), key(3)])
        backend.link("c", [key(4)])
        for _ in range(2):  # asking changes nothing
            assert backend.needed_only_by({"a"}) == [key(1)]
            assert backend.needed_only_by({"a", "b", "unknown"}) == sorted([key(1), key(2), key(3)])
            assert backend.needed_only_by({"unknown"}) == backend.needed_only_by(set()) == []
        backend.unlink({"a", "unknown"})
        backend.unlink({"a"})
        backend.unlink(set())
        assert backend.needed_only_by({"a"}) == []
        assert backend.needed_only_by({"b"}) == sorted([key(2), key(3)])
        backend.unlink({"b", "c"})
        assert backend.needed_only_by({"a", "b", "c"}) == []

    def test_what_other_documents_need(self, backend: StorageBackend) -> None:
        backend.link("a", [key(1), key(2)])
        backend.link("b", [key(2), key(3)])
        everything = {key(i) for i in range(5)}
        assert backend.needed_by_others({"a"}, everything) == {key(2), key(3)}
        assert backend.needed_by_others({"a", "b"}, everything) == set()
        assert backend.needed_by_others({"unknown"}, {key(1), key(4)}) == {key(1)}
        assert backend.needed_by_others(set(), set()) == set()

    def test_link_adds_and_may_be_repeated(self, backend: StorageBackend) -> None:
        backend.link("a", iter([key(1), key(1)]))
        backend.link("a", [key(2)])
        backend.link("a", [key(1)])
        backend.link("a", [])
        assert forget(backend, "a") == sorted([key(1), key(2)])

    def test_unlink_keeps_the_entries_themselves(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"x")
        backend.link("a", [key(1)])
        backend.unlink({"a"})
        assert key(1) in backend

    def test_nothing_was_ever_linked(self, backend: StorageBackend) -> None:
        assert forget(backend, "a") == []

    def test_any_text_names_a_document(self, backend: StorageBackend) -> None:
        names = ["", "../x", "a'; DROP TABLE needs; --", "ä🙂\x1f\0", "A", "a", "a ", "x" * 5000]
        for i, name in enumerate(names):
            backend.link(name, [key(i)])
        for i, name in enumerate(names):
            assert forget(backend, name) == [key(i)], name

    def test_close(self, backend: StorageBackend) -> None:
        backend.write(key(1), b"x")
        backend.link("a", [key(1)])
        backend.close()
        backend.close()
