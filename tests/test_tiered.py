"""Several tiers as one. That nothing deleted comes back is in test_tiered_races.py."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contracts.kv import ORIGIN, random_chunk
from contracts.storage import StorageContract, content, forget, key
from tiers import Gate, Remote, drained

import rag_blend
from rag_blend.entry import encode_entry
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import StorageBackend, open_storage
from rag_blend.storage._tiers import lane
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend
from rag_blend.storage.tiered import TieredBackend
from rag_blend.store import KVStore

CHAINS: dict[str, Callable[[Path], list[StorageBackend]]] = {
    "memory": lambda path: [MemoryBackend()],
    "memory disk": lambda path: [MemoryBackend(10**6), DiskBackend(path / "kv")],
    "memory disk remote": lambda path: [MemoryBackend(10**6), DiskBackend(path / "kv"), Remote()],
    "disk remote": lambda path: [DiskBackend(path / "kv"), Remote()],
    "memory remote": lambda path: [MemoryBackend(10**6), Remote()],
    "two remotes": lambda path: [Remote(), Remote()],
    "three memories": lambda path: [MemoryBackend(), MemoryBackend(), MemoryBackend()],
    "tiny memory": lambda path: [MemoryBackend(1), Remote(), Remote()],
}


@pytest.mark.parametrize("chain", CHAINS)
class TestContract(StorageContract):
    @pytest.fixture
    def backend(self, chain: str, tmp_path: Path) -> Iterator[StorageBackend]:
        backend = TieredBackend(CHAINS[chain](tmp_path))
        yield backend
        backend.close()


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend(10**6)


@pytest.fixture
def disk(tmp_path: Path) -> DiskBackend:
    return DiskBackend(tmp_path / "kv")


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def tiered(memory: MemoryBackend, disk: DiskBackend, remote: Remote) -> Iterator[TieredBackend]:
    backend = TieredBackend([memory, disk, remote], flush_s=0.2)
    yield backend
    backend.close()


def read_by_layers(backend: StorageBackend, name: str, size: int = 7) -> bytes:
    """Like the store: the beginning first, then some of it again, then piece by piece to the end."""
    with backend.open(name) as reader:
        reader.read(0, min(size + 3, reader.size))
        pieces = [reader.read(at, min(size, reader.size - at)).tobytes() for at in range(0, reader.size, size)]
    return b"".join(pieces)


# --- open_storage ---


def test_a_list_is_opened_as_tiers(tmp_path: Path) -> None:
    given = Remote()
    backend = open_storage(["memory://?quota=1MB", tmp_path / "a", f"disk://{tmp_path}/b", given])
    assert isinstance(backend, TieredBackend)
    assert list(backend.stats().tiers) == ["memory", "disk", "disk 2", "remote"]
    assert backend.stats().tiers["memory"].quota_bytes == 10**6
    backend.write(key(1), b"x")
    backend.close()
    for directory in ("a", "b"):
        again = DiskBackend(tmp_path / directory)
        assert content(again, key(1)) == b"x"
        again.close()
    assert content(given, key(1)) == b"x"
    assert given.was_closed


def test_of_tiers_that_cannot_all_be_opened_none_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(DiskBackend, "close", lambda self: closed.append(self.directory))
    given = Remote()
    with pytest.raises(ValueError, match="no storage backend"):
        open_storage([given, str(tmp_path / "a"), "nowhere://"])
    assert closed == [tmp_path / "a"]
    assert not given.was_closed  # it is the caller's


@pytest.mark.parametrize("where", [[], "tiered://", "tiered://kv"])
def test_no_tiers_are_refused(where: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="tiers"):
        open_storage(where)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# --- write ---


def test_a_write_reaches_all_tiers(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    tiered.write(key(1), b"data", b"label")
    assert content(memory, key(1)) == content(disk, key(1)) == b"data"  # before write returns
    assert drained(tiered)
    assert content(remote, key(1)) == b"data"
    assert dict(remote.labels()) == {key(1): b"label"}
    assert tiered.stats().tiers["remote"].counts["queued"] == 1


def test_a_farther_tier_may_hang_and_nobody_near_waits(tiered: TieredBackend, remote: Remote) -> None:
    tiered.write(key(1), b"before")
    assert drained(tiered)
    remote.before = gate = Gate("write", "get_record", "open", "__contains__")
    started = time.monotonic()
    for i in range(20):
        tiered.write(key(i), bytes([i]) * 100)
        assert content(tiered, key(i)) == bytes([i]) * 100
        tiered.link(f"doc {i}", [key(i)])
    elapsed = time.monotonic() - started
    gate.open()
    assert elapsed < 5  # each of the 41 calls of the remote would have taken 30 s
    assert drained(tiered)
    assert content(remote, key(19)) == bytes([19]) * 100
    assert forget(remote, "doc 19") == [key(19)]


def test_a_farther_tier_that_is_away_gets_it_when_it_is_back(
    tiered: TieredBackend, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.is_down = True
    for i in range(5):
        tiered.write(key(i), b"data")
        tiered.link("doc", [key(i)])
    assert not tiered.flush(0.3)
    assert tiered.stats().tiers["remote"].counts["waiting"] == 10
    remote.is_down = False
    assert drained(tiered)
    assert sorted(remote.keys()) == sorted(key(i) for i in range(5))
    assert forget(remote, "doc") == sorted(key(i) for i in range(5))
    assert tiered.stats().counts["dropped"] == 0
    assert len([r for r in caplog.records if "storage tier remote failed" in r.message]) == 1


def test_flush_does_not_wait_for_the_next_attempt(
    tiered: TieredBackend, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_FIRST_PAUSE_S", 60)
    remote.is_down = True
    tiered.write(key(1), b"data")
    assert not tiered.flush(0.2)
    remote.is_down = False
    assert tiered.flush(10)
    assert key(1) in remote


def test_what_a_farther_tier_refuses_is_dropped_and_counted(
    tiered: TieredBackend, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.refuses = {"write"}
    for i in range(3):
        tiered.write(key(i), b"data")
    assert drained(tiered)
    assert remote.calls["write"] == 2 * 3
    assert tiered.stats().tiers["remote"].counts["dropped"] == tiered.stats().counts["dropped"] == 3
    assert len([r for r in caplog.records if "see its counts" in r.message]) == 1
    assert content(tiered, key(0)) == b"data"


def test_the_queue_is_bounded_and_drops_at_once_when_nothing_moves(remote: Remote) -> None:
    home = Remote()
    backend = TieredBackend([home, remote], write_behind_bytes=1000, patience_s=0.5, flush_s=0.1)
    remote.before = gate = Gate("write")
    backend.write(key(0), bytes(400))
    gate.wait_until_reached()
    backend.write(key(1), bytes(600))
    slowest = []
    for i in range(2, 12):
        started = time.monotonic()
        backend.write(key(i), bytes(100))
        slowest.append(time.monotonic() - started)
        assert backend.stats().tiers["remote 2"].counts["waiting_bytes"] == 1000
    gate.open()
    assert sum(slowest) < 3  # not ten times the patience: 5 s
    assert drained(backend)
    assert set(remote.keys()) == {key(0), key(1)}
    assert len(list(home.keys())) == 12
    assert backend.stats().tiers["remote 2"].counts["dropped"] == 10
    backend.write(key(20), bytes(900))  # it moves again
    assert drained(backend)
    assert content(remote, key(20)) == bytes(900)
    backend.close()


def test_a_slow_farther_tier_slows_the_writer_down_and_loses_nothing() -> None:
    remote = Remote()
    remote.before = lambda name: time.sleep(0.01 if name == "write" else 0)
    most = 0
    backend = TieredBackend([Remote(), remote], write_behind_bytes=1000, patience_s=5)
    for i in range(40):
        backend.write(key(i), bytes(300))
        most = max(most, int(backend.stats().tiers["remote 2"].counts["waiting_bytes"]))
    assert 600 <= most <= 1000
    backend.close()
    assert len(list(remote.keys())) == 40
    assert backend.stats().counts["dropped"] == 0


def test_an_entry_larger_than_the_queue_waits_alone() -> None:
    remote = Remote()
    backend = TieredBackend([Remote(), remote], write_behind_bytes=100)
    for i in range(3):
        backend.write(key(i), bytes(1000))
    backend.close()
    assert len(list(remote.keys())) == 3


def test_a_full_disk_lets_the_next_tier_take_it(memory: MemoryBackend) -> None:
    home, far, farthest = Remote(), Remote(), Remote()
    backend = TieredBackend([memory, home, far, farthest])
    backend.write(key(1), b"old")
    assert drained(backend)
    home.refuses = {"write", "link"}
    backend.write(key(1), b"new", b"label")
    backend.link("doc", [key(1)])
    assert content(far, key(1)) == b"new"  # before write returns
    assert key(1) not in home  # or it would go on serving what is old
    assert content(backend, key(1)) == content(memory, key(1)) == b"new"
    assert drained(backend)
    assert content(farthest, key(1)) == b"new"
    assert forget(far, "doc") == forget(farthest, "doc") == [key(1)]
    assert backend.stats().tiers["remote"].counts["failed"] == 2
    backend.close()


def test_when_all_refuse_a_write_is_an_error(memory: MemoryBackend) -> None:
    home, far = Remote(), Remote()
    backend = TieredBackend([memory, home, far])
    home.refuses = {"write", "link"}
    far.is_down = True
    with pytest.raises(OSError, match="No space left"):
        backend.write(key(1), b"data")
    with pytest.raises(OSError, match="No space left"):
        backend.link("doc", [key(1)])
    far.is_down = False
    assert drained(backend)
    assert key(1) not in backend
    assert list(memory.keys()) == list(far.keys()) == []
    assert forget(far, "doc") == []
    backend.close()


def test_memory_that_is_too_small_is_no_reason_to_fail(disk: DiskBackend) -> None:
    memory = MemoryBackend(10)
    backend = TieredBackend([memory, disk])
    backend.write(key(1), b"small")
    backend.write(key(1), b"larger than memory")
    assert content(backend, key(1)) == b"larger than memory"  # not what memory had before
    assert list(memory.keys()) == []
    assert backend.stats().tiers["memory"].counts["failed"] >= 1
    backend.close()


def test_without_a_durable_tier_the_nearest_is_home() -> None:
    near, far = MemoryBackend(), MemoryBackend()
    backend = TieredBackend([near, far])
    backend.write(key(1), b"x")
    backend.put_record(key(2), b"y")
    assert content(near, key(1)) == b"x"
    assert drained(backend)
    assert content(far, key(1)) == b"x"
    assert near.get_record(key(2)) == far.get_record(key(2)) == b"y"
    backend.close()


# --- open ---


def test_what_no_tier_has_is_missing_and_what_none_can_tell_is_unavailable(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    with pytest.raises(ChunkNotFoundError):
        tiered.open(key(1))
    tiered.write(key(1), b"data")
    assert drained(tiered)
    remote.is_down = True
    assert content(tiered, key(1)) == b"data"
    memory.delete(key(1))
    assert content(tiered, key(1)) == b"data"
    with pytest.raises(ConnectionError):
        tiered.open(key(2))
    assert tiered.stats().tiers["remote"].counts["failed"] >= 1


def test_a_near_tier_that_fails_is_passed_over(memory: MemoryBackend, remote: Remote) -> None:
    home = Remote()
    backend = TieredBackend([memory, home, remote])
    backend.write(key(1), b"data")
    assert drained(backend)
    memory.delete(key(1))
    home.is_down = True
    assert content(backend, key(1)) == b"data"
    with pytest.raises(ConnectionError):
        backend.open(key(2))
    assert backend.stats().tiers["remote 2"].counts["hits"] == 1
    home.is_down = False
    backend.close()


def test_hits_are_counted_where_they_are(tiered: TieredBackend, memory: MemoryBackend, remote: Remote) -> None:
    tiered.write(key(1), b"data")
    remote.write(key(2), b"data")
    tiered.open(key(1)).close()
    memory.delete(key(1))
    for name in (key(1), key(1), key(2)):
        tiered.open(name).close()
    hits = {name: tier.counts.get("hits", 0) for name, tier in tiered.stats().tiers.items()}
    assert hits == {"memory": 1, "disk": 2, "remote": 1}


# --- promotion ---


def test_what_was_read_from_afar_is_near_the_next_time(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    data = bytes(range(256)) * 3
    remote.write(key(1), data, b"label")
    assert read_by_layers(tiered, key(1)) == data
    assert drained(tiered)
    assert content(memory, key(1)) == content(disk, key(1)) == data
    assert tiered.stats().counts["promoted"] == 1
    before = dict(remote.calls)
    assert read_by_layers(tiered, key(1)) == data
    assert drained(tiered)
    assert dict(remote.calls) == before  # it was not asked at all
    assert dict(tiered.labels()) == {key(1): b"label"}  # the near copies have none


def test_promotion_reads_nothing_twice(tiered: TieredBackend, remote: Remote) -> None:
    remote.write(key(1), bytes(1000))
    remote.calls.clear()
    with tiered.open(key(1)) as reader:
        reader.read(0, 1000)
    assert drained(tiered)
    assert remote.calls == {"open": 1, "read": 1, "__contains__": 1}
    assert tiered.stats().counts["promoted"] == 1


def test_from_disk_into_memory(tiered: TieredBackend, memory: MemoryBackend, remote: Remote) -> None:
    tiered.write(key(1), b"0123456789")
    assert drained(tiered)
    memory.delete(key(1))
    before = dict(remote.calls)
    assert read_by_layers(tiered, key(1), 3) == b"0123456789"
    assert drained(tiered)
    assert content(memory, key(1)) == b"0123456789"
    assert dict(remote.calls) == before


@pytest.mark.parametrize(
    "reads",
    [[], [(0, 9)], [(1, 9)], [(0, 4), (5, 5)], [(5, 5), (0, 4)], [(0, 0)]],
    ids=["nothing", "not the end", "not the beginning", "a gap", "a gap, back to front", "no bytes"],
)
def test_what_was_read_in_part_is_not_promoted(
    tiered: TieredBackend, memory: MemoryBackend, remote: Remote, reads: list[tuple[int, int]]
) -> None:
    remote.write(key(1), b"0123456789")
    with tiered.open(key(1)) as reader:
        for offset, length in reads:
            reader.read(offset, length)
    assert drained(tiered)
    assert list(memory.keys()) == []
    assert tiered.stats().counts.get("promoted", 0) == 0


def test_the_order_of_reading_does_not_matter(tiered: TieredBackend, memory: MemoryBackend, remote: Remote) -> None:
    """Entries of some dtypes have their token ids behind the layers, and ids are read first."""
    remote.write(key(1), b"0123456789")
    with tiered.open(key(1)) as reader:
        for offset, length in ((8, 2), (0, 3), (0, 5), (5, 3)):
            reader.read(offset, length)
    assert drained(tiered)
    assert content(memory, key(1)) == b"0123456789"


def test_pieces_that_overlap_are_put_together_rightly(
    tiered: TieredBackend, memory: MemoryBackend, remote: Remote
) -> None:
    data = os.urandom(100)
    remote.write(key(1), data)
    with tiered.open(key(1)) as reader:
        for offset, length in [(0, 16), (0, 30), (10, 5), (20, 40), (60, 40), (60, 40)]:
            assert reader.read(offset, length).tobytes() == data[offset : offset + length]
    assert drained(tiered)
    assert content(memory, key(1)) == data


def test_an_entry_that_ends_early_is_not_promoted(tiered: TieredBackend, memory: MemoryBackend, remote: Remote) -> None:
    remote.write(key(1), b"0123456789")
    with tiered.open(key(1)) as reader:
        reader.read(0, 5)
        with pytest.raises(CorruptChunkError):
            reader.read(5, 6)
    assert drained(tiered)
    assert list(memory.keys()) == []


@pytest.mark.parametrize("act", ["quarantine", "delete"])
@pytest.mark.parametrize("when", ["while it is read", "while it waits", "while it is written"])
def test_a_damaged_or_deleted_entry_is_not_promoted(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote, act: str, when: str
) -> None:
    remote.write(key(1), b"damaged")
    remote.write(key(2), b"another")
    in_front, gate = Gate("__contains__"), Gate("__contains__")
    if when == "while it waits":
        remote.before = in_front
        read_by_layers(tiered, key(2))
        in_front.wait_until_reached()
    elif when == "while it is written":
        remote.before = gate
    reader = tiered.open(key(1))
    reader.read(0, reader.size)
    if when == "while it is read":
        getattr(tiered, act)(key(1))
        reader.close()
    else:
        reader.close()
        if when == "while it is written":
            gate.wait_until_reached()
            assert key(1) in memory
        getattr(tiered, act)(key(1))
    in_front.open()
    gate.open()
    assert drained(tiered)
    for tier in (tiered, memory, disk, remote):
        assert key(1) not in tier
    assert tiered.stats().counts.get("promoted", 0) == (when == "while it waits")


def test_a_new_write_is_not_replaced_by_what_was_read_before(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    remote.write(key(1), b"old")
    with tiered.open(key(1)) as reader:
        reader.read(0, 3)
        tiered.write(key(1), b"new")
    assert drained(tiered)
    for tier in (memory, disk, remote):
        assert content(tier, key(1)) == b"new"


def test_what_another_process_deletes_is_not_promoted_by_this_one(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    remote.write(key(1), b"data")
    with tiered.open(key(1)) as reader:
        reader.read(0, 4)
        remote.delete(key(1))
    assert drained(tiered)
    assert list(memory.keys()) == list(disk.keys()) == []


def test_without_an_answer_from_the_source_nothing_is_kept(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    remote.write(key(1), b"data")
    with tiered.open(key(1)) as reader:
        reader.read(0, 4)
        remote.is_down = True
    assert drained(tiered)
    assert list(memory.keys()) == list(disk.keys()) == []
    remote.is_down = False
    read_by_layers(tiered, key(1))
    assert drained(tiered)
    assert key(1) in disk


def test_what_promotions_may_keep_is_bounded() -> None:
    near, far = Remote(), Remote()
    backend = TieredBackend([near, far], write_behind_bytes=1000)
    for i in range(4):
        far.write(key(i), bytes(400))
    readers = [backend.open(key(i)) for i in range(4)]
    for reader in readers:
        reader.read(0, 400)
    assert backend.stats().counts["not_promoted"] == 2
    for reader in readers:
        reader.close()
    assert drained(backend)
    assert set(near.keys()) == {key(0), key(1)}
    for i in range(2, 4):  # what they kept is free again
        read_by_layers(backend, key(i), 100)
        assert drained(backend)
    far.write(key(5), bytes(1001))
    read_by_layers(backend, key(5), 100)
    assert drained(backend)
    assert set(near.keys()) == {key(i) for i in range(4)}
    for _ in range(5):  # nor does it cost anything to look and leave, or to forget to close
        far.write(key(6), bytes(900))
        backend.open(key(6)).close()
        backend.open(key(6)).read(0, 900)
        with pytest.raises(CorruptChunkError), backend.open(key(6)) as reader:
            reader.read(0, 901)
    assert backend.stats().counts["not_promoted"] == 3
    backend.close()


def test_a_near_tier_that_refuses_a_promotion_is_only_counted(disk: DiskBackend, remote: Remote) -> None:
    home = Remote()
    home.refuses = {"write"}
    backend = TieredBackend([MemoryBackend(10**6), home, remote])
    remote.write(key(1), b"data")
    assert read_by_layers(backend, key(1)) == b"data"
    assert drained(backend)
    assert backend.stats().tiers["remote"].counts["failed"] == 1
    assert backend.stats().tiers["memory"].entries == 1
    backend.close()


def test_a_closed_reader_can_be_closed_again(tiered: TieredBackend, remote: Remote) -> None:
    remote.write(key(1), b"data")
    reader = tiered.open(key(1))
    reader.read(0, 4)
    reader.close()
    reader.close()
    assert drained(tiered)
    assert tiered.stats().counts["promoted"] == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_layers"), [(24, 3), (1, 1), (6000, 2), (24, 200)], ids=["small", "tiny", "long", "deep"]
)
@pytest.mark.parametrize("damage", [None, -1], ids=["good", "damaged"])
def test_what_a_query_reads_of_a_chunk_is_all_of_it(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote, num_tokens: int, num_layers: int,
    damage: int | None,
) -> None:  # fmt: skip
    store = KVStore(tiered, ORIGIN.fingerprint, ORIGIN.namespace, torch.float16)
    chunk = random_chunk(0, ORIGIN, torch.float16, num_tokens, num_layers)
    data = bytearray(encode_entry(chunk, torch.float16))
    if damage is not None:
        data[damage] ^= 1
    name = store.key_of(chunk.origin, chunk.token_ids)
    remote.write(name, bytes(data))
    with store.open(name) as stored:
        for i in range(num_layers - 1):
            stored.layer(i)
        if damage is None:
            stored.layer(num_layers - 1)
        else:
            with pytest.raises(CorruptChunkError) as raised:
                stored.layer(num_layers - 1)
            store.discard_damaged(name, raised.value)  # as `LayerPrefetcher` does
    assert drained(tiered)
    kept = [tier for tier in (memory, disk, remote) if name in tier]
    assert kept == ([memory, disk, remote] if damage is None else [])
    assert all(content(tier, name) == data for tier in kept)


# --- delete, quarantine ---


def test_delete_and_quarantine_reach_all_tiers(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    for act in (tiered.delete, tiered.quarantine):
        tiered.write(key(1), b"data")
        assert drained(tiered)
        act(key(1))
        for tier in (memory, disk, remote):
            assert key(1) not in tier
    assert tiered.delete(key(1)) is False
    remote.write(key(1), b"only there")
    assert tiered.delete(key(1)) is True


@pytest.mark.parametrize("act", ["delete", "quarantine"])
def test_a_tier_that_is_down_is_told_to_the_caller_when_the_others_are_done(memory: MemoryBackend, act: str) -> None:
    home, far, farthest = Remote(), Remote(), Remote()
    backend = TieredBackend([memory, home, far, farthest])
    for down in (home, far, farthest):
        backend.write(key(1), b"data")
        assert drained(backend)
        down.is_down = True
        with pytest.raises(OSError, match="call again to finish") as raised:
            getattr(backend, act)(key(1))
        assert "the server is gone" in str(raised.value)
        assert key(1) not in memory
        assert [tier for tier in (home, far, farthest) if key(1) in tier._entries] == [down]
        down.is_down = False
        getattr(backend, act)(key(1))
        assert key(1) not in backend
    backend.close()


def test_documents_and_records_too(disk: DiskBackend, remote: Remote) -> None:
    backend = TieredBackend([disk, remote])
    backend.link("doc", [key(1)])
    backend.put_record(key(2), b"record")
    assert drained(backend)
    remote.is_down = True
    for act in (lambda: backend.unlink({"doc"}), lambda: backend.delete_record(key(2))):
        with pytest.raises(OSError, match="call again to finish"):
            act()
    assert disk.needed_only_by({"doc"}) == []
    assert disk.get_record(key(2)) is None
    with pytest.raises(ConnectionError):
        backend.needed_only_by({"doc"})
    remote.is_down = False
    backend.unlink({"doc"})
    backend.delete_record(key(2))
    assert backend.needed_only_by({"doc"}) == []
    assert backend.get_record(key(2)) is None
    backend.close()


# --- documents ---


def test_a_link_reaches_the_farther_tiers_before_the_entry(remote: Remote) -> None:
    """What lies there must be forgettable by those who see only that tier."""
    backend = TieredBackend([Remote(), remote])
    order: list[str] = []
    remote.after = order.append
    backend.link("doc", [key(1)])
    backend.write(key(1), b"data")
    assert drained(backend)
    assert [name for name in order if name in ("link", "write")] == ["link", "write"]
    assert remote.needed_only_by({"doc"}) == [key(1)]
    backend.close()


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("a bug")], ids=["refused", "a bug"])
def test_a_link_is_not_given_up_and_no_entry_overtakes_it(remote: Remote, error: Exception) -> None:
    backend = TieredBackend([Remote(), remote], write_behind_bytes=1, patience_s=0.1)

    def refuse(name: str) -> None:
        if name == "link":
            raise error

    remote.before = refuse
    backend.link("doc", [key(i) for i in range(10)])
    backend.link("other", [key(i) for i in range(10, 20)])
    backend.write(key(1), b"")
    assert not backend.flush(0.5)
    assert remote.calls["link"] > 2
    assert list(remote.keys()) == []
    remote.before = lambda name: None
    assert drained(backend)
    assert forget(remote, "doc") == sorted(key(i) for i in range(10))
    assert forget(remote, "other") == sorted(key(i) for i in range(10, 20))
    assert backend.stats().counts["dropped"] == 1  # the entry: the queue stood still
    backend.close()


def test_what_documents_need_as_any_tier_knows() -> None:
    home, far = Remote(), Remote()
    backend = TieredBackend([MemoryBackend(), home, far])
    home.link("a", [key("home only"), key("both"), key("others, far"), key("others, home")])
    far.link("a", [key("far only"), key("both"), key("others, far")])
    far.link("b", [key("others, far")])  # from another machine
    home.link("c", [key("others, home")])
    far.link("c", [key("far only")])
    assert backend.needed_only_by({"a"}) == sorted([key("home only"), key("both")])
    assert backend.needed_only_by({"a", "b"}) == sorted([key("home only"), key("both"), key("others, far")])
    assert backend.needed_only_by({"a", "c"}) == sorted(
        [key("home only"), key("both"), key("others, home"), key("far only")]
    )
    assert backend.needed_only_by({"d"}) == []
    backend.unlink({"a", "c"})
    assert home.needed_only_by({"a", "c"}) == far.needed_only_by({"a", "c"}) == []
    assert backend.needed_only_by({"b"}) == [key("others, far")]
    backend.close()


def test_documents_are_listed_as_far_as_tiers_can() -> None:
    home, far = Remote(), Remote()
    backend = TieredBackend([MemoryBackend(), home, far])
    backend.link("a", [key(1)])
    backend.link("empty", [])
    assert drained(backend)
    home.link("a", [key(2)])
    far.link("b", [key(3)])
    assert dict(backend.documents()) == {"a": sorted([key(1), key(2)]), "b": [key(3)]}
    far.is_down = True
    assert dict(backend.documents()) == {"a": sorted([key(1), key(2)])}
    home.is_down = True
    with pytest.raises(ConnectionError):
        backend.documents()
    backend.close()


# --- listings ---


def test_listings_are_the_union(tiered: TieredBackend, disk: DiskBackend, remote: Remote) -> None:
    tiered.write(key(1), b"everywhere", b"one")
    assert drained(tiered)
    disk.write(key(2), b"on disk")
    remote.write(key(2), b"also far", b"two")
    remote.write(key(3), b"far", b"three")
    remote.write(key(4), b"far")
    disk.put_record(key(5), b"x")
    remote.put_record(key(6), b"y")
    remote.delete(key(1))
    assert sorted(tiered.keys()) == sorted(key(i) for i in range(1, 5))
    assert sorted(tiered.labels()) == sorted(
        [(key(1), dict(disk.labels())[key(1)]), (key(2), b"two"), (key(3), b"three"), (key(4), b"")]
    )
    assert sorted(tiered.records()) == sorted([key(5), key(6)])


def test_each_label_comes_from_whoever_knows_it() -> None:
    tiers = [Remote(), Remote(), Remote()]
    backend = TieredBackend(tiers)
    for i, tier in enumerate(tiers):
        tier.write(key("all"), b"x", b"label" if i else b"")
        tier.write(key(i), b"x", bytes([i]))
    tiers[0].write(key("none"), b"x")
    found = list(backend.labels())
    assert len(found) == len(dict(found)) == 5
    assert dict(found) == {
        key("all"): b"label", key("none"): b"", key(0): b"\0", key(1): b"\1", key(2): b"\2",
    }  # fmt: skip
    backend.close()


def test_a_tier_that_is_down_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    home, far, farthest = Remote(), Remote(), Remote()
    backend = TieredBackend([MemoryBackend(), home, far, farthest])
    for i, tier in enumerate((home, far, farthest)):
        tier.write(key(i), b"x")
    far.is_down = True
    for _ in range(3):
        assert sorted(backend.keys()) == sorted([key(0), key(2)])
    assert backend.stats().tiers["remote 2"].counts["failed"] >= 3
    assert len([r for r in caplog.records if "remote 2 failed" in r.message and r.levelno == logging.WARNING]) == 1
    backend.close()


@pytest.mark.parametrize(
    ("listing", "expected"),
    [("labels", [(key(0), b""), (key(2), b"")]), ("records", [key(10), key(12)])],
)
def test_a_listing_breaks_off_only_when_the_others_are_through(listing: str, expected: list[object]) -> None:
    home, far, farthest = Remote(), Remote(), Remote()
    backend = TieredBackend([MemoryBackend(), home, far, farthest])
    for i, tier in enumerate((home, far, farthest)):
        tier.write(key(i), b"x")
        tier.put_record(key(10 + i), b"x")
    far.is_down = True
    found: list[object] = []
    with pytest.raises(ConnectionError):
        for item in getattr(backend, listing)():
            found.append(item)
    assert sorted(found) == sorted(expected)  # type: ignore[type-var]  # who forgets something knows it is not all
    backend.close()


def test_memory_drops_what_another_process_deleted_when_it_is_listed(
    tiered: TieredBackend, memory: MemoryBackend, disk: DiskBackend, remote: Remote
) -> None:
    for i in range(3):
        tiered.write(key(i), b"data", bytes([i]))
    assert drained(tiered)
    for tier in (disk, remote):
        tier.delete(key(1))
    remote.delete(key(2))
    assert {name for name, _ in tiered.labels()} == {key(0), key(2)}
    assert set(memory.keys()) == {key(0), key(2)}
    disk.delete(key(0))
    remote.delete(key(0))
    assert list(tiered.keys()) == [key(2)]
    disk.delete(key(2))
    remote.is_down = True  # nobody knows whether it still has it
    with pytest.raises(ConnectionError):
        list(tiered.labels())
    assert list(tiered.keys()) == list(memory.keys()) == [key(2)]


# --- records ---


def test_the_farthest_tier_decides_whose_record_is_first(tmp_path: Path, remote: Remote) -> None:
    one, other = (TieredBackend([MemoryBackend(), DiskBackend(tmp_path / name), remote]) for name in "ab")
    one.put_record(key(1), b"one")
    other.put_record(key(1), b"other")
    assert one.get_record(key(1)) == other.get_record(key(1)) == b"one"
    for directory in "ab":
        assert DiskBackend(tmp_path / directory).get_record(key(1)) == b"one"
    one.close()
    other.close()


def test_a_record_of_the_far_tier_replaces_a_near_one_that_differs(disk: DiskBackend, remote: Remote) -> None:
    backend = TieredBackend([disk, remote])
    remote.is_down = True
    backend.put_record(key(1), b"written while it was away")
    assert backend.get_record(key(1)) == b"written while it was away"
    remote.is_down = False
    remote.put_record(key(1), b"everybody's")
    assert backend.get_record(key(1)) == b"everybody's"
    assert disk.get_record(key(1)) == b"everybody's"
    remote.is_down = True
    assert backend.get_record(key(1)) == b"everybody's"
    with pytest.raises(ConnectionError):
        backend.get_record(key(2))
    backend.close()


def test_a_far_tier_that_was_emptied_gets_its_records_back(disk: DiskBackend) -> None:
    full, empty = Remote(), Remote()
    backend = TieredBackend([disk, full])
    backend.put_record(key(1), b"the sample")
    backend = TieredBackend([disk, Remote()])
    backend.put_record(key(1), b"another")  # was not the first
    assert backend.get_record(key(1)) == b"the sample"
    backend = TieredBackend([disk, empty])
    assert backend.get_record(key(1)) == b"the sample"
    assert empty.get_record(key(1)) == b"the sample"
    backend.put_record(key(1), b"another")
    assert backend.get_record(key(1)) == b"the sample"
    empty._records.clear()
    empty.refuses = {"put_record"}  # read-only by now
    assert backend.get_record(key(1)) == b"the sample"
    backend.close()


def test_a_record_that_another_machine_deleted_does_not_come_back(tmp_path: Path, remote: Remote) -> None:
    disks = [DiskBackend(tmp_path / name) for name in "ab"]
    one, other = (TieredBackend([MemoryBackend(), disk, remote]) for disk in disks)
    one.put_record(key(1), b"a text that is forgotten later")
    assert other.get_record(key(1)) is not None
    one.delete_record(key(1))
    assert disks[1].get_record(key(1)) is not None  # out of reach
    assert other.get_record(key(1)) is None
    assert disks[1].get_record(key(1)) is None
    assert remote.get_record(key(1)) is None
    other.put_record(key(1), b"a new one")
    assert one.get_record(key(1)) == other.get_record(key(1)) == b"a new one"
    assert [name for backend in (one, other) for name in backend.records()] == [key(1)] * 2
    del remote._records[key(1)]  # evicted, unlike the mark of the deletion before
    assert one.get_record(key(1)) == remote.get_record(key(1)) == b"a new one"
    one.close()
    other.close()


def test_another_process_sees_at_once_that_a_record_is_gone(tmp_path: Path) -> None:
    one, other = (TieredBackend([MemoryBackend(), DiskBackend(tmp_path / "kv")]) for _ in range(2))
    one.put_record(key(1), b"x")
    assert other.get_record(key(1)) == b"x"
    one.delete_record(key(1))
    assert other.get_record(key(1)) is None
    one.close()
    other.close()


def test_a_record_is_put_where_it_can_be(disk: DiskBackend, remote: Remote) -> None:
    home = Remote()
    backend = TieredBackend([home, remote])
    home.refuses = {"put_record"}
    backend.put_record(key(1), b"x")
    assert backend.get_record(key(1)) == b"x"
    remote.refuses = {"put_record"}
    with pytest.raises(OSError, match="No space left"):
        backend.put_record(key(2), b"x")
    backend.close()


# --- statistics and limits ---


def test_statistics(tiered: TieredBackend, remote: Remote) -> None:
    tiered.write(key(1), bytes(10))
    tiered.write(key(2), bytes(20))
    assert drained(tiered)
    remote.write(key(3), bytes(30))
    stats = tiered.stats()
    assert (stats.entries, stats.bytes) == (3, 60)  # the tier that holds most
    assert {name: (tier.entries, tier.bytes) for name, tier in stats.tiers.items()} == {
        "memory": (2, 30),
        "disk": (2, 30),
        "remote": (3, 60),
    }
    assert stats.counts["queued"] == 2
    remote.is_down = True
    stats = tiered.stats()
    assert (stats.entries, stats.bytes) == (2, 30)
    assert stats.tiers["remote"].counts["failed"] >= 1


def test_limits_are_passed_on() -> None:
    class Limited(MemoryBackend):
        parallel_reads = 3
        seconds = 0.0

        def limit_calls(self, seconds: float) -> None:
            self.seconds = seconds

    tiers = [MemoryBackend(), Limited(), Limited()]
    backend = TieredBackend(tiers)
    assert backend.parallel_reads == 3
    backend.limit_calls(0.5)
    assert [tier.seconds for tier in tiers[1:]] == [0.5, 0.5]  # type: ignore[attr-defined]
    backend.close()


# --- the end ---


def test_close_writes_what_is_queued_and_closes_all(memory: MemoryBackend) -> None:
    remotes = [Remote(), Remote()]
    backend = TieredBackend([memory, *remotes])
    remotes[1].before = lambda name: time.sleep(0.01)
    for i in range(10):
        backend.write(key(i), b"data")
    backend.close()
    assert len(list(remotes[1].keys())) == 10
    assert [remote.was_closed for remote in remotes] == [True, True]


def test_close_does_not_wait_for_a_tier_that_hangs(memory: MemoryBackend, caplog: pytest.LogCaptureFixture) -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([memory, home, remote], flush_s=0.3)
    remote.before = gate = Gate("write")
    for i in range(3):
        backend.write(key(i), b"data")
    gate.wait_until_reached()
    started = time.monotonic()
    backend.close()
    assert time.monotonic() - started < 3
    assert home.was_closed
    assert not remote.was_closed  # it is in use
    assert backend.stats().counts["dropped"] == 2
    assert [r.message for r in caplog.records if "is not closed" in r.message]
    gate.open()
    assert drained(backend)
    assert len(list(remote.keys())) == 1  # what was under way is finished, not torn


def test_a_tier_that_cannot_be_closed_does_not_keep_the_others_open(memory: MemoryBackend) -> None:
    class Stuck(Remote):
        def close(self) -> None:
            raise OSError("no")

    tiers = [Remote(), Stuck(), Remote()]
    backend = TieredBackend(tiers)
    with pytest.raises(OSError, match="no"):
        backend.close()
    assert tiers[0].was_closed and tiers[2].was_closed


def test_no_thread_stays_behind(tiered: TieredBackend, remote: Remote) -> None:
    before = threading.active_count()
    for _ in range(3):
        remote.write(key(2), b"data")
        tiered.write(key(1), b"data")
        read_by_layers(tiered, key(2))
        assert drained(tiered)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


SCRIPT = """
    import sys, threading, types
    sys.modules["rag_blend"] = package = types.ModuleType("rag_blend")  # without what it imports, which takes seconds
    package.__path__ = [{path!r}]
    from rag_blend.storage import open_storage
    from rag_blend.storage._tiers import lane
    from rag_blend.storage.disk import DiskBackend

    backend = open_storage([sys.argv[1], sys.argv[2]])
    for i in range(4):
        backend.link(f"doc {{i}}", [f"{{i:064x}}"])
        backend.write(f"{{i:064x}}", bytes(100_000))
    {end}
"""


def run_script(tmp_path: Path, end: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT).format(path=str(Path(rag_blend.__file__).parent), end=end)
    command = [sys.executable, "-c", script, str(tmp_path / "near"), str(tmp_path / "far")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del backend", "threading.Thread(target=print).start()"])
def test_a_process_that_ends_without_closing_has_written_everything(tmp_path: Path, end: str) -> None:
    done = run_script(tmp_path, end=end)
    assert (done.returncode, done.stderr) == (0, "")
    far = DiskBackend(tmp_path / "far")
    assert sorted(far.keys()) == [f"{i:064x}" for i in range(4)]
    assert forget(far, "doc 3") == [f"{3:064x}"]
    far.close()


def test_a_process_whose_far_tier_hangs_ends_all_the_same(tmp_path: Path) -> None:
    hang = "lane.EXIT_SECONDS = 0.5; backend._durable.far[0].tier.backend.write = lambda *_: threading.Event().wait(); "
    started = time.monotonic()
    done = run_script(tmp_path, end=hang + 'backend.write("f" * 64, b"x")')
    assert done.returncode == 0
    assert time.monotonic() - started < 30
    near = DiskBackend(tmp_path / "near")
    assert "f" * 64 in near
    near.close()


def test_a_forked_child_writes_its_own_and_nothing_of_its_parent(tmp_path: Path) -> None:
    remote = Remote()
    far = DiskBackend(tmp_path / "far")
    backend = TieredBackend([MemoryBackend(), DiskBackend(tmp_path / "near"), remote, far], flush_s=5)
    remote.before = gate = Gate("write")
    backend.write(key(1), b"the parent's")
    gate.wait_until_reached()
    counted = backend.stats().tiers["disk 2"].counts["queued"]
    pid = os.fork()
    if not pid:
        code = 1
        try:
            remote.before = lambda name: None
            backend.write(key(2), b"the child's")
            backend.flush(10)
            same = content(backend, key(2)) == content(far, key(2)) == b"the child's"
            code = int(not same or key(2) not in remote or key(1) in remote)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.open()
    assert counted == 1
    backend.close()
    assert set(remote.keys()) == {key(1)}
    again = DiskBackend(tmp_path / "far")
    assert sorted(again.keys()) == sorted([key(1), key(2)])
    again.close()


def test_the_place_of_an_entry_is_the_nearest_tier_that_has_it(tmp_path: Path) -> None:
    memory, disk = MemoryBackend(), DiskBackend(tmp_path)
    tiers = TieredBackend([memory, disk])
    tiers.write(key(0), b"entry")
    assert tiers.place_of(key(0)) == "memory"
    memory.delete(key(0))
    assert tiers.place_of(key(0)) == "disk"
    tiers.close()
