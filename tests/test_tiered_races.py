"""Nothing that was deleted comes back, however the calls of several processes and threads fall.

Processes are played by several `TieredBackend`s on the same `Remote`. Where their calls can be counted, all orders are
tried one after the other.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.storage import content, key
from tiers import Gate, Remote, drained, interleave

from rag_blend.errors import ChunkNotFoundError
from rag_blend.storage import StorageBackend
from rag_blend.storage._tiers.lane import Job
from rag_blend.storage._tiers.marks import is_mark, mark_of
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend
from rag_blend.storage.tiered import TieredBackend

K = key("the entry")


def orders(*counts: int) -> Iterator[tuple[int, ...]]:
    """All ways to shuffle so many steps of each actor."""
    if not any(counts):
        yield ()
    for i, count in enumerate(counts):
        if count:
            left = (*counts[:i], count - 1, *counts[i + 1 :])
            yield from ((i, *rest) for rest in orders(*left))


def caught(backend: TieredBackend) -> list[Job]:
    """What is queued for the far tier or for promotion from now on, instead of being done."""
    jobs: list[Job] = []
    for lane in (backend._durable.far[0].lane, *backend._promotions.values()):
        lane.put = lambda job, waits=True: jobs.append(job) or True  # type: ignore[method-assign,func-returns-value]
    return jobs


# --- a copy on its way to the far tier ---


def test_every_order_of_a_copy_and_a_deletion_by_another_process() -> None:
    """A copy asks for the mark, writes, asks again and may take back; a deletion changes the mark and deletes."""
    seen = set()
    for order in orders(4, 3):
        remote = Remote()
        writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
        jobs = caught(writer)
        writer.write(K, b"data")
        taken = interleave([jobs[0].run, lambda other=other: other.delete(K)], [remote], order)
        assert list(remote.keys()) == [], order
        seen.add(taken[0])
    assert seen == {1, 3, 4}  # withdrawn before it was written; deleted by the other; taken back


def test_every_order_when_the_key_had_been_deleted_before() -> None:
    """The mark is an old one when the entry is written, and a new one when it is deleted again."""
    for order in orders(4, 3):
        remote = Remote()
        writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
        other.delete(K)
        jobs = caught(writer)
        writer.write(K, b"data")
        interleave([jobs[0].run, lambda other=other: other.delete(K)], [remote], order)
        assert list(remote.keys()) == [], order


def test_every_order_with_two_deletions_at_once() -> None:
    every = list(orders(4, 3, 3))
    for order in random.Random(0).sample(every, 400):
        remote = Remote()
        writer, *others = (TieredBackend([Remote(), remote]) for _ in range(3))
        others[0].delete(K)
        jobs = caught(writer)
        writer.write(K, b"data")
        interleave([jobs[0].run, *(lambda o=o: o.delete(K) for o in others)], [remote], order)
        assert list(remote.keys()) == [], order


def test_every_order_of_a_copy_of_a_link_and_unlinking_by_another_process() -> None:
    for order in orders(4, 3):
        remote = Remote()
        writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
        jobs = caught(writer)
        writer.link("doc", [K])
        interleave([jobs[0].run, lambda other=other: other.unlink({"doc"})], [remote], order)
        assert remote.needed_only_by({"doc"}) == [], order


def test_every_order_when_calls_of_the_copy_fail_on_the_way() -> None:
    """Its write takes effect but is not answered, and the next question neither; then it goes on."""
    for order in orders(7, 3):
        remote = Remote()
        writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
        jobs = caught(writer)
        writer.write(K, b"data")
        faults, copying = ["write", "get_record"], set[int]()

        def run(copy: Job = jobs[0], copying: set[int] = copying) -> None:
            copying.add(threading.get_ident())
            for _ in range(3):
                with contextlib.suppress(TimeoutError):
                    return copy.run()

        def fail(name: str, faults: list[str] = faults, copying: set[int] = copying) -> None:
            if threading.get_ident() in copying and faults[:1] == [name]:
                faults.pop(0)
                raise TimeoutError("no answer")

        remote.after = fail
        interleave([run, lambda other=other: other.delete(K)], [remote], order)
        assert list(remote.keys()) == [], order
        assert not jobs[0].must_finish, order


def test_a_deletion_while_the_copy_waits_in_the_queue() -> None:
    remote = Remote()
    writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
    remote.before = gate = Gate("write")
    writer.write(key("in front"), b"x")
    gate.wait_until_reached()
    writer.write(K, b"data")
    other.delete(K)
    gate.open()
    assert drained(writer)
    assert list(remote.keys()) == [key("in front")]
    assert writer.stats().counts["withdrawn"] == 1
    assert content(writer, K) == b"data"  # the home of another machine is out of reach
    writer.delete(K)
    assert K not in writer


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_deletion_by_this_process_while_the_copy_is_written(where: str) -> None:
    """It returns when the copy is not there and cannot come any more."""
    remote = Remote()
    writer = TieredBackend([MemoryBackend(), Remote(), remote])
    gate = Gate("write")
    setattr(remote, where, gate)
    writer.write(K, b"data")
    gate.wait_until_reached()
    deletion = threading.Thread(target=writer.delete, args=(K,))
    deletion.start()
    time.sleep(0.1)
    assert deletion.is_alive()
    gate.open()
    deletion.join(10)
    assert not deletion.is_alive()
    assert list(remote.keys()) == []
    assert drained(writer)
    assert list(remote.keys()) == []


def test_a_deletion_that_could_not_leave_a_mark_still_holds_in_its_own_process() -> None:
    remote = Remote()
    writer = TieredBackend([Remote(), remote])
    remote.is_down = True
    writer.write(K, b"data")
    with pytest.raises(OSError, match="call again"):
        writer.delete(K)
    remote.is_down = False
    assert drained(writer)
    assert remote.calls["write"] <= 1
    assert list(remote.keys()) == []


def test_a_deletion_that_fails_while_the_copy_is_written_still_holds_in_its_own_process() -> None:
    """No mark was left, and the entry is there: only this process knows that it must go."""
    remote = Remote()
    writer = TieredBackend([Remote(), remote])
    remote.after = gate = Gate("write")
    writer.write(K, b"data")
    gate.wait_until_reached()
    remote.refuses = {"delete_record", "put_record", "delete"}
    opening = threading.Timer(0.2, gate.open)
    opening.start()
    with pytest.raises(OSError, match="call again"):
        writer.delete(K)
    opening.join()
    assert list(remote.keys()) == [K]
    remote.refuses = set()
    assert drained(writer)
    assert list(remote.keys()) == []


def test_what_is_written_anew_after_a_deletion_stays() -> None:
    remote = Remote()
    writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
    for turn in range(3):
        writer.write(K, b"data")
        assert drained(writer)
        assert content(remote, K) == b"data"
        (other if turn else writer).delete(K)
        assert list(remote.keys()) == []
        other.write(K, b"anew")  # by another process, which may not even have known that it was deleted
        assert drained(other)
        assert content(remote, K) == b"anew"
        assert content(TieredBackend([Remote(), remote]), K) == b"anew"


def test_a_newly_written_entry_stays_while_an_older_copy_is_withdrawn() -> None:
    """All orders of an old copy of one process and a new one of another, the key having been deleted in between."""
    for order in orders(1, 3):
        remote = Remote()
        old, new = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
        old_jobs, new_jobs = caught(old), caught(new)
        old.write(K, b"old")
        new.delete(K)
        new.write(K, b"new")
        interleave([old_jobs[0].run, new_jobs[0].run], [remote], order)
        assert content(remote, K) == b"new"


def test_in_one_process_the_last_write_wins_in_all_tiers() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    remote.before = gate = Gate("write")
    backend.write(K, b"first")
    gate.wait_until_reached()
    for data in (b"second", b"third"):
        backend.write(K, data)
    gate.open()
    assert drained(backend)
    assert content(home, K) == content(remote, K) == b"third"


def test_a_deletion_by_another_process_also_catches_the_copy_of_what_was_written_anew_since() -> None:
    remote = Remote()
    writer, other = TieredBackend([Remote(), remote]), TieredBackend([Remote(), remote])
    remote.before = gate = Gate("write")
    writer.write(K, b"first")
    gate.wait_until_reached()
    writer.write(K, b"second")
    other.delete(K)
    gate.open()
    assert drained(writer)
    assert list(remote.keys()) == []


def test_a_copy_stays_if_the_newer_one_has_no_room() -> None:
    remote = Remote()
    backend = TieredBackend([Remote(), remote], write_behind_bytes=5, patience_s=0.05)
    remote.before = gate = Gate("write")
    backend.write(K, b"first")
    gate.wait_until_reached()
    backend.write(K, b"second")
    assert backend.stats().counts["dropped"] == 1
    gate.open()
    assert drained(backend)
    assert content(remote, K) == b"first"  # as good as the second: the key tells what it is made from


def in_the_background() -> bool:
    return threading.current_thread().name.startswith("rag-blend-storage tier")


@pytest.mark.parametrize("is_deleted_meanwhile", [False, True])
def test_an_older_copy_does_not_take_away_what_home_refused(is_deleted_meanwhile: bool) -> None:
    """The remote tier takes the new entry at once, while the old copy's write has not been answered yet."""
    home, remote = Remote(), Remote()
    backend, other = TieredBackend([home, remote]), TieredBackend([Remote(), remote])

    def unanswered(name: str) -> None:
        if in_the_background() and (name == "write" or K in remote._entries):
            raise TimeoutError("no answer")

    remote.after = unanswered
    backend.write(K, b"old")
    assert not backend.flush(0.05)
    if is_deleted_meanwhile:
        other.delete(K)
    home.refuses = {"write"}
    backend.write(K, b"new")
    remote.after = lambda name: None
    assert drained(backend)
    assert content(remote, K) == content(backend, K) == b"new"


def test_what_home_refuses_is_written_after_an_older_copy() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    gate = Gate("write")
    remote.before = lambda name: gate(name) if in_the_background() else None
    backend.write(K, b"old")
    gate.wait_until_reached()
    home.refuses = {"write"}
    opening = threading.Timer(0.2, gate.open)
    opening.start()
    backend.write(K, b"new")
    opening.join()
    assert drained(backend)
    assert content(remote, K) == content(backend, K) == b"new"


def test_an_unreadable_mark_counts_as_none_and_an_old_one_then_withdraws_the_copy() -> None:
    """Nobody knows which came first, the deletion or the write: erasing goes first."""
    for was_deleted in (False, True):
        remote = Remote()
        writer = TieredBackend([Remote(), remote])
        if was_deleted:
            TieredBackend([Remote(), remote]).delete(K)
        remote.is_down = True
        writer.write(K, b"data")
        remote.is_down = False
        assert drained(writer)
        assert list(remote.keys()) == ([] if was_deleted else [K])
        assert writer.stats().counts["withdrawn"] == was_deleted
        writer.write(K, b"data")  # now it can be read
        assert drained(writer)
        assert content(remote, K) == b"data"


def test_a_process_that_is_closed_leaves_no_copy_that_was_deleted() -> None:
    """The deletion falls between the copy's write and its check, which is not answered until after the closing."""
    remote = Remote()
    writer, other = TieredBackend([Remote(), remote], flush_s=0.3), TieredBackend([Remote(), remote])
    remote.before = gate = Gate("write")
    writer.write(K, b"data")
    gate.wait_until_reached()
    other.delete(K)

    def unanswered(name: str) -> None:
        if name == "get_record":
            raise TimeoutError("no answer")

    remote.before = unanswered
    gate.open()
    writer.close()
    assert list(remote.keys()) == [K]
    remote.before = lambda name: None
    assert drained(writer)
    assert list(remote.keys()) == []


def test_a_deletion_in_the_middle_of_a_write_withdraws_its_copy() -> None:
    home, remote = Remote(), Remote()
    writer, other = TieredBackend([home, remote]), TieredBackend([Remote(), remote])
    home.after = lambda name: other.delete(K) and None if name == "write" else None
    writer.write(K, b"data")
    assert drained(writer)
    assert list(remote.keys()) == []


def test_there_is_one_mark_for_a_key_however_often_it_is_deleted() -> None:
    remote = Remote()
    backend = TieredBackend([Remote(), remote])
    contents = set()
    for _ in range(5):
        backend.write(K, b"data")
        assert drained(backend)
        backend.delete(K)
        (mark,) = [name for name in remote.records() if is_mark(name)]
        contents.add(remote.get_record(mark))
    assert mark == mark_of("entry", K)
    assert len(contents) == 5
    assert list(backend.records()) == []


def test_marks_differ() -> None:
    names = [mark_of(kind, name) for kind in ("entry", "record", "document") for name in (K, key(1), "", "ä")]
    assert len({*names}) == len(names)
    assert all(is_mark(name) and len(name) == 64 and int(name, 16) for name in names)
    assert not any(is_mark(key(i)) for i in range(1000))


# --- a promotion ---


def test_every_order_of_a_promotion_and_a_deletion_by_another_process() -> None:
    """Both have the same near tier, as two processes on one disk have."""
    for order in orders(4, 4):
        home, remote = Remote(), Remote()
        reading, other = TieredBackend([home, remote]), TieredBackend([home, remote])
        remote.write(K, b"data")
        jobs = caught(reading)
        with reading.open(K) as reader:
            reader.read(0, 4)
        interleave([jobs[0].run, lambda other=other: other.delete(K)], [home, remote], order)
        assert list(home.keys()) == list(remote.keys()) == [], order


def test_every_order_of_a_promotion_and_a_quarantine_by_another_process() -> None:
    for order in orders(4, 2):
        home, remote = Remote(), Remote()
        reading, other = TieredBackend([home, remote]), TieredBackend([home, remote])
        remote.write(K, b"damaged")
        jobs = caught(reading)
        with reading.open(K) as reader:
            reader.read(0, 7)
        interleave([jobs[0].run, lambda other=other: other.quarantine(K)], [home, remote], order)
        assert list(home.keys()) == list(remote.keys()) == [], order


@pytest.mark.parametrize(("which", "name"), [("home", "__contains__"), ("home", "write"), ("remote", "__contains__")])
@pytest.mark.parametrize("act", ["delete", "quarantine", "write"])
def test_this_process_acts_while_a_promotion_is_in_mid_step(which: str, name: str, act: str) -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([MemoryBackend(), home, remote])
    remote.write(K, b"data")
    gate = Gate(name)
    {"home": home, "remote": remote}[which].before = gate
    with backend.open(K) as reader:
        reader.read(0, 4)
    gate.wait_until_reached()
    doing = threading.Thread(target=lambda: getattr(backend, act)(K, *([b"new"] if act == "write" else [])))
    doing.start()
    doing.join(0.1)
    gate.open()
    doing.join(10)
    assert not doing.is_alive()
    assert drained(backend)
    for tier in (backend, home, remote):
        if act == "write":
            assert content(tier, K) == b"new"
        else:
            assert K not in tier


def test_what_is_written_anew_is_not_taken_back_with_an_old_promotion() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    remote.write(K, b"old")
    with backend.open(K) as reader:
        reader.read(0, 3)
        remote.delete(K)
        remote.after = gate = Gate("__contains__")
    remote.before = Gate("write")  # the new copy is still under way
    gate.wait_until_reached()  # the promotion has just learnt that it must go
    assert content(home, K) == b"old"
    backend.write(K, b"new")
    gate.open()
    assert not backend.flush(0.2)
    assert content(home, K) == b"new"
    remote.before.open()
    assert drained(backend)


def test_an_old_promotion_does_not_take_the_place_of_what_home_refused() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    for name in (key("in front"), K):
        remote.write(name, b"old")
    home.before = gate = Gate("__contains__")
    for name in (key("in front"), K):
        with backend.open(name) as reader:
            reader.read(0, 3)
    gate.wait_until_reached()
    open_still = [backend.open(K) for _ in range(2)]
    home.refuses = {"write"}
    backend.write(K, b"new")
    home.refuses = set()
    gate.open()
    for reader in open_still:
        reader.read(0, 3)
        reader.close()
    assert drained(backend)
    assert content(backend, K) == b"new"
    assert list(home.keys()) == [key("in front")]


def test_a_promotion_whose_write_is_not_answered_is_taken_back_too() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    remote.write(K, b"data")

    def unanswered(name: str) -> None:
        if name == "write":
            raise TimeoutError("no answer")

    home.after = unanswered
    with backend.open(K) as reader:
        reader.read(0, 4)
        remote.delete(K)
    assert drained(backend)
    assert home.calls["write"] == 1
    assert list(home.keys()) == []
    assert backend.stats().counts.get("promoted", 0) == 0


def test_a_promotion_that_cannot_be_taken_back_is_not_forgotten() -> None:
    home, remote = Remote(), Remote()
    backend = TieredBackend([home, remote])
    remote.write(K, b"data")
    home.refuses = {"delete"}
    with backend.open(K) as reader:
        reader.read(0, 4)
        remote.delete(K)
    assert not backend.flush(0.5)
    assert K in home
    home.refuses = set()
    assert drained(backend)
    assert list(home.keys()) == []


# --- everything at once ---


def data_of(name: str) -> bytes:
    return name.encode() * (1 + int(name[:2], 16) % 40)


def do_something(backend: TieredBackend, name: str, dice: float) -> None:
    if dice < 0.4:
        backend.write(name, data_of(name), b"label")
    elif dice < 0.6:
        backend.delete(name)
    elif dice < 0.65:
        backend.quarantine(name)
    else:
        with contextlib.suppress(ChunkNotFoundError):
            assert content(backend, name) == data_of(name)


def hammer(backends: list[TieredBackend], keys: list[str], seconds: float) -> list[BaseException]:
    """Threads that write, read and delete; returns what went wrong."""
    wrong: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end and not wrong:
            try:
                do_something(backends[seed % len(backends)], rng.choice(keys), rng.random())
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return wrong


@pytest.mark.parametrize("processes", [1, 2])
def test_many_threads_with_a_tiny_memory_and_a_slow_remote(processes: int, tmp_path: Path) -> None:
    remote, rng = Remote(), random.Random(1)
    remote.before = lambda name: time.sleep(rng.random() * 0.003)
    backends = [
        TieredBackend([MemoryBackend(3000), DiskBackend(tmp_path), remote], write_behind_bytes=20_000)
        for _ in range(processes)
    ]
    keys = [key(i) for i in range(12)]
    assert hammer(backends, keys, 3.0) == []
    for name in keys[:6]:  # under way or not: gone
        for backend in backends:
            backend.delete(name)
    for backend in backends:
        assert drained(backend)
    remote.before = lambda name: None
    nearest: list[StorageBackend] = [*backends, remote]
    for tier in nearest:
        assert not {*tier.keys()} & {*keys[:6]}
        assert not any(name in tier for name in keys[:6])
    counts = [backend.stats().counts for backend in backends]
    assert sum(c["queued"] for c in counts) > 50
    assert sum(c.get("promoted", 0) for c in counts) > 0
    assert sum(c["withdrawn"] for c in counts) > 0
    for backend in backends:
        backend.close()


def test_what_nobody_deletes_is_in_the_far_tier_in_the_end() -> None:
    remote = Remote()
    remote.before = lambda name: time.sleep(0.001)
    backends = [TieredBackend([MemoryBackend(500), Remote(), remote], write_behind_bytes=2000) for _ in range(2)]
    writers: list[Callable[[], None]] = []
    for i in range(8):
        writers.append(
            lambda i=i: [backends[i % 2].write(key((i, n)), bytes([i]) * 200) for n in range(20)] and None  # type: ignore[misc]
        )
    threads = [threading.Thread(target=write) for write in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for backend in backends:
        assert drained(backend)
        assert backend.stats().counts["dropped"] == backend.stats().counts["withdrawn"] == 0
    assert len(list(remote.keys())) == 160
    assert all(content(remote, key((i, n))) == bytes([i]) * 200 for i in range(8) for n in range(20))
