from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import _blocks, _guard
from rag_blend.storage._blocks import BlockReader, changed_meanwhile
from rag_blend.storage._guard import CircuitBreaker, DeniedError, Guard

SOON = 5.0  # on a busy machine; what hangs in these tests would hang for a minute


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class LibraryError(Exception):
    """What a client's library raises."""


class Client:
    """A client whose calls hang until it is disconnected, or until `go_on` is set."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.go_on = threading.Event()
        self.was_disconnected = False

    def hang(self) -> str:
        self.go_on.wait(60.0)
        return "late"

    def disconnect(self) -> None:
        self.was_disconnected = True
        self.go_on.set()


class Server:
    """Makes clients, and remembers them."""

    def __init__(self) -> None:
        self.clients: list[Client] = []

    def connect(self, seconds: float) -> Client:
        self.clients.append(Client(seconds))
        return self.clients[-1]

    def guard(self, deadline_s: float = 0.2, write_deadline_s: float = 60.0) -> Guard[Client]:
        def translate(error: Exception) -> Exception:
            return OSError(f"server: {error}") if isinstance(error, LibraryError) else error

        return Guard("server", self.connect, Client.disconnect, translate, deadline_s, write_deadline_s)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def guard(server: Server) -> Iterator[Guard[Client]]:
    guard = server.guard()
    yield guard
    guard.close()
    for client in server.clients:
        client.go_on.set()


def raise_(error: BaseException) -> None:
    raise error


def fail(breaker: CircuitBreaker, error: BaseException) -> None:
    with pytest.raises(type(error)), breaker.attempt():
        raise error


def succeed(breaker: CircuitBreaker) -> None:
    with breaker.attempt():
        pass


def is_open(breaker: CircuitBreaker) -> bool:
    try:
        succeed(breaker)
    except ConnectionError as error:
        assert "not asked" in str(error)
        return True
    return False


@pytest.fixture
def threads() -> Callable[[], int]:
    """Counts the threads that a test's guards have now."""

    def all_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rag-blend-remote"}

    before = all_threads()
    return lambda: len(all_threads() - before)


def eventually(is_true: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + SOON
    while not is_true() and time.monotonic() < give_up:
        time.sleep(0.01)
    return is_true()


# --- the breaker ---


@pytest.mark.parametrize("error", [OSError("broken"), ConnectionResetError(), ConnectionRefusedError()])
def test_three_failures_in_a_row_open_it(error: OSError) -> None:
    breaker = CircuitBreaker("server", Clock())
    for _ in range(2):
        fail(breaker, error)
    succeed(breaker)
    for _ in range(3):
        assert breaker.counts.get("opened") is None
        fail(breaker, error)
    assert is_open(breaker)
    assert breaker.counts == {"failures": 5, "opened": 1, "refused": 1}


def test_one_timeout_opens_it() -> None:
    breaker = CircuitBreaker("server", Clock())
    fail(breaker, TimeoutError())
    assert is_open(breaker)
    assert breaker.counts == {"timeouts": 1, "opened": 1, "refused": 1}


def test_while_it_is_open_nothing_is_asked_and_the_error_says_for_how_long() -> None:
    clock = Clock()
    breaker = CircuitBreaker("redis://host:6379", clock)
    fail(breaker, TimeoutError())
    clock.now += 1.8
    asked = False
    with pytest.raises(ConnectionError, match=r"redis://host:6379 failed and is not asked for another 3\.2 s"):
        with breaker.attempt():
            asked = True
    assert not asked


@pytest.mark.parametrize(
    "answer",
    [FileNotFoundError("no"), DeniedError("full"), ChunkNotFoundError("k"), CorruptChunkError("bad"), KeyError()],
)
def test_an_answer_is_no_failure(answer: Exception) -> None:
    breaker = CircuitBreaker("server", Clock())
    for _ in range(5):
        fail(breaker, answer)
        fail(breaker, OSError())
        fail(breaker, OSError())
    assert not is_open(breaker)
    assert breaker.counts.get("denied", 0) == (5 if isinstance(answer, DeniedError) else 0)


def test_after_the_pause_one_call_tries_and_its_success_lets_all_in() -> None:
    clock = Clock()
    breaker = CircuitBreaker("server", clock)
    fail(breaker, TimeoutError())
    clock.now += _guard.PAUSE_S - 0.01
    assert is_open(breaker)
    clock.now += 0.01
    with breaker.attempt():
        assert is_open(breaker)  # for others, until this one is done
    with breaker.attempt():
        assert not is_open(breaker)
    fail(breaker, OSError())
    assert not is_open(breaker)


@pytest.mark.parametrize("error", [OSError(), TimeoutError()])
def test_when_the_first_call_fails_the_pause_begins_anew(error: OSError) -> None:
    clock = Clock()
    breaker = CircuitBreaker("server", clock)
    fail(breaker, TimeoutError())
    for _ in range(3):
        clock.now += _guard.PAUSE_S
        fail(breaker, error)
        assert is_open(breaker)
    assert breaker.counts["opened"] == 4


def test_a_first_call_that_was_interrupted_leaves_its_place_to_the_next() -> None:
    clock = Clock()
    breaker = CircuitBreaker("server", clock)
    fail(breaker, TimeoutError())
    clock.now += _guard.PAUSE_S
    fail(breaker, KeyboardInterrupt())
    assert not is_open(breaker)


@pytest.mark.parametrize("outcome", [None, OSError(), TimeoutError()])
def test_calls_from_before_the_pause_change_nothing(outcome: OSError | None) -> None:
    clock = Clock()
    breaker = CircuitBreaker("server", clock)
    early = breaker.attempt()
    early.__enter__()
    fail(breaker, TimeoutError())
    clock.now += _guard.PAUSE_S - 1.0
    assert not early.__exit__(outcome and type(outcome), outcome, None)
    assert is_open(breaker)
    clock.now += 1.0
    assert not is_open(breaker)
    assert breaker.counts["opened"] == 1


# --- deadlines ---


def test_a_call_ends_at_its_deadline_and_is_cut_off(
    guard: Guard[Client], server: Server, threads: Callable[[], int]
) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"server did not answer within 0\.2 s"):
        guard.read(Client.hang)
    assert 0.2 <= time.monotonic() - start < SOON
    assert server.clients[0].was_disconnected
    with pytest.raises(ConnectionError, match="not asked"):
        guard.read(lambda client: "not even tried")
    assert guard.counts == {"timeouts": 1, "opened": 1, "refused": 1}
    assert eventually(lambda: threads() == 0)  # what hung is gone


def test_after_the_pause_it_is_asked_again(
    guard: Guard[Client], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "PAUSE_S", 0.1)
    with pytest.raises(TimeoutError):
        guard.read(Client.hang)
    time.sleep(0.15)
    assert guard.read(lambda client: "answer") == "answer"
    assert len(server.clients) == 2  # a client that was cut off is not used again


def test_what_comes_in_time_comes_from_one_thread(
    guard: Guard[Client], server: Server, threads: Callable[[], int]
) -> None:
    names = {guard.read(lambda client: threading.current_thread().name) for _ in range(20)}
    assert names == {"rag-blend-remote"}
    assert len(server.clients) == threads() == 1
    assert server.clients[0].seconds == 0.2
    guard.change(lambda client: None)
    assert [client.seconds for client in server.clients] == [0.2, 60.0]


def test_a_limit_holds_for_reading_only_and_never_exceeds_the_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "PAUSE_S", 0.0)
    guard = server.guard(deadline_s=0.3, write_deadline_s=0.4)

    def given(call: Callable[[Callable[[Client], str]], str]) -> float:
        with pytest.raises(TimeoutError) as error:
            call(Client.hang)
        return float(str(error.value).split()[-2])

    for seconds, limit in ((0.05, 0.05), (0.2, 0.2), (100.0, 0.3), (0.1, 0.1)):
        guard.limit(seconds)
        assert (given(guard.read), given(guard.look), given(guard.change)) == (limit, 0.3, 0.4)
    guard.close()


def test_a_process_that_stands_still_itself_does_not_blame_the_server(server: Server) -> None:
    def collect_garbage(client: Client) -> str:
        sum(range(20_000_000))  # no other thread runs meanwhile, as in a garbage collection
        time.sleep(0.01)
        return "answer"

    guard = server.guard(deadline_s=0.05)
    assert [guard.read(collect_garbage) for _ in range(3)] == ["answer"] * 3
    assert guard.counts == {}
    guard.close()


@pytest.mark.parametrize("deadlines", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"), 1.0), (1.0, 1e9)])
def test_a_deadline_that_is_none_is_refused(server: Server, deadlines: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="deadlines"):
        server.guard(*deadlines)


def test_calls_that_hang_do_not_pile_up(
    server: Server, threads: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a library whose calls cannot be cut off, only so many threads hang; then calls fail for want of one."""
    monkeypatch.setattr(_guard, "READERS", 3)
    monkeypatch.setattr(_guard, "PAUSE_S", 0.0)
    guard = Guard("server", server.connect, lambda client: None, lambda error: error, 0.05, 1.0)
    for _ in range(10):
        with pytest.raises(TimeoutError):
            guard.read(Client.hang)
    assert len(server.clients) == threads() == 3
    for client in server.clients:
        client.go_on.set()
    assert eventually(lambda: threads() == 0)
    assert guard.read(lambda client: "answer") == "answer"
    guard.close()


def test_long_writes_keep_no_query_waiting(guard: Guard[Client], server: Server) -> None:
    writes = [threading.Thread(target=guard.change, args=(Client.hang,)) for _ in range(2 * _guard.WRITERS)]
    for thread in writes:
        thread.start()
    assert eventually(lambda: len(server.clients) == _guard.WRITERS)
    assert guard.read(lambda client: "answer") == "answer"
    while any(thread.is_alive() for thread in writes):
        for client in server.clients:
            client.go_on.set()
        time.sleep(0.01)
    assert guard.counts == {}


def test_many_calls_at_once(guard: Guard[Client], server: Server) -> None:
    results: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            results.append(guard.look(lambda client: i))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == sorted(list(range(8)) * 20)
    assert len(server.clients) <= 8


def test_an_interrupted_caller_leaves_nothing_behind(
    guard: Guard[Client], server: Server, threads: Callable[[], int]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            guard.change(Client.hang)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert server.clients[0].was_disconnected
    assert eventually(lambda: threads() == 0)
    assert guard.counts == {}
    assert guard.change(lambda client: "answer") == "answer"


# --- errors ---


def test_the_library_s_errors_become_ours_and_others_stay(guard: Guard[Client]) -> None:
    with pytest.raises(OSError, match="server: broken") as translated:
        guard.read(lambda client: raise_(LibraryError("broken")))
    assert isinstance(translated.value.__cause__, LibraryError)
    with pytest.raises(ZeroDivisionError):
        guard.read(lambda client: 1 / 0)
    assert guard.counts == {"failures": 1}


def test_a_panic_is_an_error_like_others(guard: Guard[Client]) -> None:
    class PanicException(BaseException):
        """What a library written in Rust raises."""

    with pytest.raises(OSError, match="PanicException: at the disco"):
        guard.read(lambda client: raise_(PanicException("at the disco")))
    assert guard.counts == {"failures": 1}


def test_a_client_that_cannot_be_made_takes_no_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "READERS", 2)
    monkeypatch.setattr(_guard, "PAUSE_S", 0.0)
    errors = [OSError("no such host")] * 5

    def connect(seconds: float) -> Client:
        if errors:
            raise errors.pop()
        return server.connect(seconds)

    guard = Guard("server", connect, Client.disconnect, lambda error: error, 5.0, 5.0)
    for _ in range(5):
        with pytest.raises(OSError, match="no such host"):
            guard.read(lambda client: None)
    assert guard.read(lambda client: "answer") == "answer"
    guard.close()


# --- processes, threads, memory ---


def test_a_forked_process_has_clients_and_counts_of_its_own(guard: Guard[Client], server: Server) -> None:
    with pytest.raises(FileNotFoundError):
        guard.read(lambda client: raise_(FileNotFoundError()))
    with pytest.raises(OSError):
        guard.read(lambda client: raise_(LibraryError()))
    child = os.fork()
    if child == 0:
        answer = guard.read(lambda client: client is server.clients[1] and not guard.counts)
        os._exit(0 if answer else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert guard.read(lambda client: client is server.clients[0])
    assert guard.counts == {"failures": 1}


def test_closing_ends_all_threads(server: Server, threads: Callable[[], int]) -> None:
    guard = server.guard()
    guard.read(lambda client: None)
    guard.change(lambda client: None)
    assert threads() == 2
    guard.close()
    guard.close()
    assert eventually(lambda: threads() == 0)
    assert all(client.was_disconnected for client in server.clients)


def test_a_guard_that_nobody_closed_leaves_no_threads_behind(server: Server, threads: Callable[[], int]) -> None:
    guard = server.guard()
    guard.read(lambda client: None)
    guard.change(lambda client: None)
    assert threads() == 2
    del guard
    gc.collect()
    assert eventually(lambda: threads() == 0)


def test_what_a_call_returned_is_not_kept(guard: Guard[Client]) -> None:
    gone = weakref.ref(guard.read(lambda client: np.zeros(10)))
    gc.collect()
    assert eventually(lambda: gone() is None)


# --- blocks ---


class Remote:
    """An entry somewhere, and what was asked for."""

    def __init__(self, size: int) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
        self.asked: list[tuple[int, int]] = []

    def fetch(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return self.data[offset : offset + length]

    def reader(self, first: int) -> BlockReader:
        return BlockReader(len(self.data), self.data[:first], self.fetch)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 100)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [0, 1, 29, 30, 31, 129, 130, 131, 230, 457])
def test_every_range_of_every_size_is_right_and_nothing_is_fetched_twice(size: int) -> None:
    remote = Remote(size)
    with remote.reader(first=min(30, size)) as reader:
        for offset in range(0, size, 7):
            for length in (0, 1, 50, 101, size - offset):
                if offset + length <= size:
                    assert reader.read(offset, length).tobytes() == remote.data[offset : offset + length]
    covered = sorted(byte for offset, length in remote.asked for byte in range(offset, offset + length))
    assert covered == list(range(30, size))


@pytest.mark.usefixtures("small_blocks")
def test_only_the_blocks_that_are_needed_are_fetched() -> None:
    remote = Remote(457)
    with remote.reader(first=30) as reader:
        reader.read(0, 30)
        assert remote.asked == []
        reader.read(250, 1)
        reader.read(229, 2)
        assert remote.asked == [(230, 100), (130, 100)]


@pytest.mark.usefixtures("small_blocks")
def test_an_entry_that_ends_early_is_damaged() -> None:
    remote = Remote(457)
    with remote.reader(first=30) as reader:
        remote.data = remote.data[:300]
        assert len(reader.read(0, 200)) == 200
        for _ in range(2):
            with pytest.raises(CorruptChunkError, match="300 of 457"):
                reader.read(200, 200)


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_could_not_be_had_is_asked_for_again() -> None:
    remote = Remote(457)
    errors = [changed_meanwhile("a" * 64), TimeoutError()]

    def fetch(offset: int, length: int) -> bytes:
        if errors:
            raise errors.pop()
        return remote.fetch(offset, length)

    with BlockReader(457, remote.data[:30], fetch) as reader:
        with pytest.raises(TimeoutError):
            reader.read(100, 300)
        with pytest.raises(OSError) as changed:
            reader.read(100, 300)
        assert changed.value.errno == errno.ESTALE
        assert reader.read(100, 300).tobytes() == remote.data[100:400]


def test_an_entry_of_an_absurd_size_is_damaged_and_reserves_nothing() -> None:
    for size in (1 << 62, 1 << 70):
        with pytest.raises(CorruptChunkError):
            BlockReader(size, b"", lambda offset, length: b"")


def test_more_than_was_promised_is_not_used() -> None:
    with BlockReader(3, b"abcdef", lambda offset, length: b"") as reader:
        assert reader.read(0, 3).tobytes() == b"abc"


def test_reading_a_closed_entry_is_an_error() -> None:
    reader = Remote(10).reader(first=10)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 1)


def test_what_is_read_is_writable_so_that_torch_does_not_warn() -> None:
    with Remote(10).reader(first=10) as reader:
        assert reader.read(2, 3).flags.writeable
