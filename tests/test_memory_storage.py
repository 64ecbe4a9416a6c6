"""The memory backend's quota. What holds for every backend is in test_storage.py."""

from __future__ import annotations

import os
import threading

import pytest
from contracts.storage import StorageContract, content, key

from rag_blend.errors import ChunkNotFoundError
from rag_blend.storage import StorageBackend, open_storage
from rag_blend.storage.memory import MemoryBackend


class TestContractWithinAQuota(StorageContract):
    @pytest.fixture
    def backend(self) -> StorageBackend:
        return MemoryBackend(quota_bytes=10**6)


def test_the_entry_that_was_not_used_for_longest_goes() -> None:
    memory = MemoryBackend(quota_bytes=100)
    for i in range(3):
        memory.write(key(i), bytes(30))
    memory.open(key(0)).close()
    memory.write(key(3), bytes(40))
    assert set(memory.keys()) == {key(0), key(2), key(3)}
    memory.write(key(4), bytes(95))
    assert list(memory.keys()) == [key(4)]
    stats = memory.stats()
    assert (stats.entries, stats.bytes, stats.quota_bytes, stats.counts["evicted"]) == (1, 95, 100, 4)
    with pytest.raises(ChunkNotFoundError):
        memory.open(key(0))


def test_what_exactly_fits_evicts_nothing() -> None:
    memory = MemoryBackend(quota_bytes=100)
    memory.write(key(1), bytes(60))
    memory.write(key(2), bytes(40))
    memory.write(key(1), bytes(59))  # replaces: what was there does not count
    memory.write(key(1), bytes(60))
    assert memory.stats().bytes == 100
    memory.delete(key(1))
    memory.quarantine(key(2))
    memory.write(key(3), bytes(100))
    assert memory.stats().counts["evicted"] == 0
    assert memory.stats().bytes == 100


def test_an_entry_larger_than_the_quota_is_refused_and_nothing_changes() -> None:
    memory = MemoryBackend(quota_bytes=1000)
    memory.write(key(1), b"old")
    memory.write(key(2), b"other")
    with pytest.raises(OSError, match=r"1,001 bytes .* 1,000 bytes"):
        memory.write(key(1), bytes(1001))
    assert content(memory, key(1)) == b"old"
    assert content(memory, key(2)) == b"other"
    assert memory.stats().counts["evicted"] == 0


def test_an_evicted_label_is_gone() -> None:
    memory = MemoryBackend(quota_bytes=10)
    memory.write(key(1), bytes(6), b"first")
    memory.write(key(2), bytes(6), b"second")
    assert list(memory.labels()) == [(key(2), b"second")]


def test_a_reader_keeps_what_was_evicted() -> None:
    memory = MemoryBackend(quota_bytes=10)
    memory.write(key(1), b"0123456789")
    with memory.open(key(1)) as reader:
        memory.write(key(2), b"9876543210")
        assert key(1) not in memory
        assert reader.read(0, 10).tobytes() == b"0123456789"


def test_empty_entries_take_no_room() -> None:
    memory = MemoryBackend(quota_bytes=1)
    for i in range(10):
        memory.write(key(i), b"")
    memory.write(key(10), b"x")
    assert len(list(memory.keys())) == 11


def test_the_quota_holds_while_many_write() -> None:
    memory = MemoryBackend(quota_bytes=5000)
    most: list[int] = []
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            for n in range(200):
                name = key((i * n) % 17)
                memory.write(name, bytes([n % 7]) * (1 + n % 7) * 300)
                most.append(memory.stats().bytes)
                if n % 5 == 0:
                    memory.delete(name)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < max(most) <= 5000
    assert memory.stats().bytes == sum(len(content(memory, name)) for name in memory.keys())


@pytest.mark.parametrize(
    ("url", "quota"),
    [("memory://", None), ("memory://?quota=512MB", 512 * 10**6), ("memory://?quota=1.5GiB", 3 * 2**29)],
)
def test_the_quota_in_a_url(url: str, quota: int | None) -> None:
    memory = open_storage(url)
    assert isinstance(memory, MemoryBackend)
    assert memory.quota_bytes == memory.stats().quota_bytes == quota


@pytest.mark.parametrize(
    "rest", ["x", "x?quota=1MB", "?", "?quota=", "?quota=much", "?quota=0", "?qouta=1MB", "?quota=1MB&ttl=5"]
)
def test_other_words_in_a_url_are_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=r"memory|size"):
        open_storage(f"memory://{rest}")


@pytest.mark.parametrize("quota", [0, -1])
def test_a_quota_is_more_than_nothing(quota: int) -> None:
    with pytest.raises(ValueError, match="room for nothing"):
        MemoryBackend(quota)


def test_which_documents_need_what_others_need_too() -> None:
    memory = MemoryBackend()
    memory.link("a", [key(1), key(2)])
    memory.link("b", [key(2), key(3)])
    everything = {key(i) for i in range(5)}
    assert memory.needed_by_others({"a"}, everything) == {key(2), key(3)}
    assert memory.needed_by_others({"a"}, {key(1), key(2)}) == {key(2)}
    assert memory.needed_by_others({"a", "b"}, everything) == set()
    assert memory.needed_by_others(set(), {key(1)}) == {key(1)}


def test_a_child_does_not_wait_for_a_lock_that_nobody_holds_there() -> None:
    """Another thread of the parent was writing when it forked."""
    memory = MemoryBackend(quota_bytes=100)
    memory.write(key(1), bytes(50))
    with memory._lock:
        pid = os.fork()
        if not pid:
            done = 1
            try:
                memory.write(key(2), bytes(60))
                done = int(list(memory.keys()) != [key(2)])
            finally:
                os._exit(done)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(memory.keys()) == [key(1)]
