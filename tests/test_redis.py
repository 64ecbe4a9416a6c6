"""RedisBackend on a real Redis, and on servers that misbehave."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.storage import StorageContract, content, forget, key
from servers import Server, free_ports, is_noticed_at_once, redis_server, took

import rag_blend.storage
from rag_blend import BlendEngine
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import StorageBackend, _blocks, _guard, open_storage

redis = pytest.importorskip("redis")

from rag_blend.storage import redis as module  # noqa: E402
from rag_blend.storage.redis import RedisBackend  # noqa: E402

SOON = 5.0  # on a busy machine; a call that does not end at its deadline takes a minute here
LARGE = os.urandom(3 * 4096)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"test:{secrets.token_hex(8)}"


@pytest.fixture
def backend(server: Server, prefix: str) -> Iterator[RedisBackend]:
    backend = RedisBackend(server.url, prefix, deadline_s=10.0)
    yield backend
    backend.close()


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One that a test may pause and stop."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(module, "FIRST_BYTES", 1024)


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that treats every connection so, after the first bytes have come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=treat, args=(connection,), daemon=True).start()

        def treat(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rag-blend-remote"}


class TestRedis(StorageContract):
    pass


class TestRedisInSmallBlocks(StorageContract):
    @pytest.fixture(autouse=True)
    def blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_blocks, "BLOCK_BYTES", 1000)

    test_threads_see_whole_entries_only = None  # an entry of many blocks cannot be read on once it is replaced


class TestClientOfSomebodyElse(StorageContract):
    @pytest.fixture
    def backend(self, client: redis.Redis, prefix: str) -> Iterator[StorageBackend]:
        backend = RedisBackend(client, prefix, deadline_s=10.0)
        yield backend
        backend.close()
        assert client.ping()


# --- what is in Redis ---


def test_an_entry_is_one_string_and_all_names_begin_with_the_prefix(
    backend: RedisBackend, client: redis.Redis, prefix: str
) -> None:
    backend.write(key(1), b"entry", b"label")
    backend.put_record(key(2), b"record")
    backend.link("a document", [key(1)])
    backend.write(key(3), b"damaged")
    backend.quarantine(key(3))
    names = {name.decode().removeprefix(f"{prefix}:"): client.type(name) for name in client.scan_iter(f"{prefix}:*")}
    (document,) = (name for name in names if name.startswith("document:"))
    assert names == {
        f"entry:{key(1)}": b"string",
        f"record:{key(2)}": b"string",
        f"bad:{key(3)}": b"string",
        f"needs:{key(1)}": b"set",
        document: b"set",
    }
    assert b"a document" not in b"".join(client.scan_iter(f"{prefix}:*"))  # names of documents are nobody's business
    assert client.get(f"{prefix}:record:{key(2)}") == b"record"


def test_backends_with_other_prefixes_do_not_meet(server: Server, backend: RedisBackend, prefix: str) -> None:
    backend.write(key(1), b"x")
    for other in (f"{prefix}2", f"{prefix}:entry", prefix[:-1]):
        stranger = RedisBackend(server.url, other)
        assert list(stranger.keys()) == list(stranger.records()) == []
        assert stranger.delete(key(1)) is False
        stranger.close()
    assert key(1) in backend


def test_quarantine_keeps_the_evidence_for_a_day_and_delete_removes_it(
    backend: RedisBackend, client: redis.Redis, prefix: str
) -> None:
    backend.write(key(1), b"damaged")
    backend.quarantine(key(1))
    bad = f"{prefix}:bad:{key(1)}"
    assert client.get(bad).endswith(b"damaged")
    assert 24 * 3600 - 60 < client.ttl(bad) <= 24 * 3600
    assert backend.delete(key(1)) is False
    assert list(client.scan_iter(f"{prefix}:*")) == []  # the cache of an erased text is gone for good


def test_other_people_s_keys_are_not_ours(backend: RedisBackend, client: redis.Redis, prefix: str) -> None:
    backend.write(key(1), b"x", b"label")
    for name in ("note", key(2)[:-1], key(2) + "0", b"\xff" * 64, key(2).upper()):
        client.set(f"{prefix}:entry:".encode() + (name if isinstance(name, bytes) else name.encode()), b"y")
    assert list(backend.keys()) == [key(1)]
    assert list(backend.labels()) == [(key(1), b"label")]
    assert backend.stats().entries == 1


def test_many_entries_are_listed_once_each(
    backend: RedisBackend, client: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", 7)
    labels = {key(i): b"label %d" % i for i in range(60)}
    for name, label in labels.items():
        backend.write(name, b"12345", label)
    listed = []
    for name, label in backend.labels():
        listed.append((name, label))
        if len(listed) == 10:  # Redis rehashes meanwhile, and names keys twice
            client.mset({f"other:{i}": b"" for i in range(5000)})
    assert len(listed) == 60
    assert dict(listed) == labels
    assert (backend.stats().entries, backend.stats().bytes) == (60, 300)


def test_links_of_many_entries(backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 7)
    backend.link("a", map(key, range(40)))
    backend.link("b", map(key, range(30, 50)))
    assert backend.needed_only_by({"a"}) == sorted(map(key, range(30)))
    assert forget(backend, "b") == sorted(map(key, range(40, 50)))
    assert forget(backend, "a") == sorted(map(key, range(40)))


def test_what_is_linked_while_a_document_is_unlinked_stays_linked(
    server: Server, prefix: str, backend: RedisBackend, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RedisBackend(server.url, prefix)
    backend.link("a", [key(1)])
    read = backend._members

    def then_link(kind: str, keys: list[str]) -> list[set[str]]:
        found = read(kind, keys)
        other.link("a", [key(2)])
        return found

    monkeypatch.setattr(backend, "_members", then_link)
    backend.unlink({"a"})
    assert other.needed_only_by({"a"}) == [key(2)]
    assert other.needed_only_by({"b"}) == []
    other.unlink({"a"})
    assert list(client.scan_iter(f"{prefix}:*")) == []
    other.close()


def test_what_cannot_be_a_key_is_not_linked(backend: RedisBackend) -> None:
    with pytest.raises(ValueError):
        backend.link("a", [key(1), "*"])
    assert backend.needed_only_by({"a"}) == []


def test_an_entry_larger_than_redis_takes_is_refused_by_name(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.write(key(1), b"old")
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", 100)
    with pytest.raises(OSError, match="an entry of 200 bytes: a value in Redis has at most 100") as error:
        backend.write(key(1), bytes(200))
    assert error.value.errno == errno.EFBIG
    assert content(backend, key(1)) == b"old"
    assert backend.counts == {}


# --- damage, eviction ---


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, -1])
def test_a_truncated_value_is_damaged(backend: RedisBackend, client: redis.Redis, prefix: str, length: int) -> None:
    backend.write(key(1), b"0123456789", b"label")
    name = f"{prefix}:entry:{key(1)}"
    client.set(name, client.get(name)[:length])
    with pytest.raises(ChunkNotFoundError if length == 0 else CorruptChunkError):
        backend.open(key(1))
    backend.quarantine(key(1))
    backend.write(key(1), b"good")
    assert content(backend, key(1)) == b"good"


@pytest.mark.parametrize("value", [b"hello", b"x" * 100, b"RBE1" + b"\xff" * 100])
def test_a_value_of_somebody_else_is_damaged(
    backend: RedisBackend, client: redis.Redis, prefix: str, value: bytes
) -> None:
    client.set(f"{prefix}:entry:{key(1)}", value)
    with pytest.raises(CorruptChunkError):
        backend.open(key(1))
    assert dict(backend.labels()) in ({key(1): b""}, {key(1): value[32:]})
    assert backend.stats().entries == 1


def test_something_that_is_no_string_is_an_error_and_no_reason_to_stop_asking(
    backend: RedisBackend, client: redis.Redis, prefix: str
) -> None:
    client.lpush(f"{prefix}:entry:{key(1)}", b"x")
    for _ in range(5):
        with pytest.raises(OSError, match="WRONGTYPE"):
            backend.open(key(1))
    assert backend.counts == {"denied": 5}
    backend.write(key(1), b"good")
    assert content(backend, key(1)) == b"good"


@pytest.mark.usefixtures("small_blocks")
def test_a_large_entry_is_read_in_blocks_of_one_version(backend: RedisBackend) -> None:
    backend.write(key(1), LARGE, b"label")
    assert content(backend, key(1)) == LARGE
    with backend.open(key(1)) as reader:
        assert reader.read(5000, 3000).tobytes() == LARGE[5000:8000]
        for change in (lambda: backend.write(key(1), LARGE, b"label"), lambda: backend.delete(key(1))):
            change()
            with pytest.raises(OSError, match="deleted or replaced") as error:
                reader.read(9000, 3000)
            assert error.value.errno == errno.ESTALE  # no damage: the new one must not be set aside
            assert reader.read(0, 9000).tobytes() == LARGE[:9000]  # what came before is whole


@pytest.mark.usefixtures("small_blocks")
def test_an_entry_truncated_while_it_is_read_is_damaged(
    backend: RedisBackend, client: redis.Redis, prefix: str
) -> None:
    backend.write(key(1), LARGE)
    name = f"{prefix}:entry:{key(1)}"
    with backend.open(key(1)) as reader:
        client.set(name, client.get(name)[:-10])
        with pytest.raises(CorruptChunkError):
            reader.read(0, len(LARGE))


def test_an_evicted_entry_is_missing_and_not_listed(backend: RedisBackend, client: redis.Redis, prefix: str) -> None:
    for i in range(3):
        backend.write(key(i), b"x", b"label")
    client.delete(f"{prefix}:entry:{key(1)}")
    with pytest.raises(ChunkNotFoundError):
        backend.open(key(1))
    assert sorted(backend.labels()) == sorted((key(i), b"label") for i in (0, 2))
    assert key(1) not in backend
    assert backend.counts == {}


def test_an_entry_evicted_during_the_listing_is_left_out(
    backend: RedisBackend, client: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        backend.write(key(i), b"x", b"label")
    pages = list(backend._pages("entry"))
    client.delete(f"{prefix}:entry:{key(1)}")
    monkeypatch.setattr(backend, "_pages", lambda kind: pages)
    assert sorted(backend.labels()) == sorted((key(i), b"label") for i in (0, 2))
    assert backend.stats().entries == 2


def test_a_redis_that_evicts_what_was_used_longest_ago(tmp_path: Path) -> None:
    entry = os.urandom(400_000)
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        backend = open_storage(server.url)
        for i in range(40):
            backend.write(key(i), entry, b"label")
        before = set(backend.keys())
        listed = {name for name, label in backend.labels() if label == b"label"}
        read = set()
        for i in range(40):
            with contextlib.suppress(ChunkNotFoundError, OSError):  # gone before or while it is read
                assert content(backend, key(i)) == entry
                read.add(key(i))
        assert 3 < len(before) < 30
        assert read <= listed <= before  # to read takes memory, so one more may have gone meanwhile
        assert len(before - read) <= 3
        assert backend.counts == {}
        backend.close()


def test_with_expiry_redis_evicts_entries_but_neither_records_nor_links(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "volatile-lru") as server:
        backend = open_storage(f"{server.url}?expire_s=3600")
        for i in range(40):
            backend.put_record(key(i), b"record")
            backend.link(f"doc {i}", [key(i)])
            backend.write(key(i), bytes(400_000))
        assert 3 < len(list(backend.keys())) < 30
        assert len(list(backend.records())) == 40
        assert backend.needed_only_by({f"doc {i}" for i in range(40)}) == sorted(map(key, range(40)))
        backend.close()


def test_a_full_redis_refuses_entries_and_goes_on_serving_those_it_has(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        backend = open_storage(server.url)
        backend.write(key(0), b"old")
        for i in range(20):
            with contextlib.suppress(OSError):
                backend.write(key(i), os.urandom(400_000))
        assert backend.stats().counts["denied"] > 5
        with pytest.raises(OSError, match="maxmemory"):
            backend.write(key(30), b"x")
        assert len(content(backend, key(0))) in (3, 400_000)
        backend.close()


def test_an_entry_expires(server: Server, prefix: str, client: redis.Redis) -> None:
    backend = RedisBackend(server.url, prefix, expire_s=1000)
    backend.write(key(1), b"x")
    assert 900 < client.ttl(f"{prefix}:entry:{key(1)}") <= 1000
    backend.close()
    with pytest.raises(ValueError, match="expire_s"):
        RedisBackend(server.url, expire_s=0)


# --- a server that is down, silent or slow ---


def test_a_server_that_is_down_is_noticed_at_once() -> None:
    is_noticed_at_once(open_storage(f"redis://127.0.0.1:{free_ports(1)[0]}"), ConnectionError)


def test_a_silent_server_costs_one_deadline_and_is_used_again_when_it_speaks(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "PAUSE_S", 1.0)
    backend = open_storage(f"{own_server.url}?deadline_s=0.3")
    backend.write(key(1), b"entry")
    own_server.pause()
    assert 0.3 <= took(lambda: backend.open(key(1)), TimeoutError) < SOON
    refused = [took(lambda: backend.open(key(1)), ConnectionError) for _ in range(20)]
    assert sorted(refused)[10] < 0.01
    time.sleep(1.1)
    assert 0.3 <= took(lambda: backend.open(key(1)), TimeoutError) < SOON  # tried again, in vain
    own_server.resume()
    time.sleep(1.1)
    assert content(backend, key(1)) == b"entry"
    assert backend.stats().counts == {"timeouts": 2, "opened": 2, "refused": 20}
    backend.close()


def test_a_query_s_limit_is_kept_and_writing_has_its_own(own_server: Server) -> None:
    backend = open_storage(own_server.url)
    backend.write(key(1), b"entry")
    backend.limit_calls(0.1)
    own_server.pause()
    with pytest.raises(TimeoutError, match=r"redis://127\.0\.0\.1:\d+ did not answer within 0\.1 s"):
        backend.open(key(1))
    other = open_storage(f"{own_server.url}?write_deadline_s=0.6")
    with pytest.raises(TimeoutError, match=r"within 0\.6 s"):
        other.write(key(1), b"x")
    backend.close()
    other.close()


@pytest.mark.usefixtures("small_blocks")
def test_a_server_that_falls_silent_while_an_entry_is_read(own_server: Server) -> None:
    backend = open_storage(f"{own_server.url}?deadline_s=0.3")
    backend.write(key(1), LARGE)
    with backend.open(key(1)) as reader:
        own_server.pause()
        assert took(lambda: reader.read(5000, 10), TimeoutError) < SOON
        own_server.resume()
    backend.close()


def test_a_server_that_trickles_costs_one_deadline_and_no_thread() -> None:
    """A socket's timeout would begin anew with every byte."""
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"$9999999\r\n")
        while not stop.wait(0.02):
            connection.sendall(b"x")

    before = threads()
    with answering(trickle) as url:
        backend = open_storage(f"{url}?deadline_s=0.3")
        assert 0.3 <= took(lambda: backend.get_record(key(1)), TimeoutError) < SOON
        assert took(lambda: backend.open(key(1)), ConnectionError) < 1.0
        give_up = time.monotonic() + SOON
        while threads() - before and time.monotonic() < give_up:
            time.sleep(0.01)
        assert threads() - before == set()  # those of other tests may end meanwhile
        backend.close()
    stop.set()


@pytest.mark.parametrize(
    "answer", [b"", b"+OK\r\n", b"$100\r\nabc", b"\0\0\0", b"HTTP/1.1 200 OK\r\n\r\n", b"-ERR no\r\n"]
)
def test_a_server_that_talks_nonsense_is_an_error(answer: bytes) -> None:
    with answering(lambda connection: connection.sendall(answer)) as url:
        backend = open_storage(f"{url}?deadline_s=5")
        start = time.monotonic()
        with pytest.raises((OSError, CorruptChunkError)):
            backend.open(key(1))
        assert time.monotonic() - start < SOON
        backend.close()


def test_a_restarted_server_is_empty_but_no_error(own_server: Server) -> None:
    backend = open_storage(own_server.url)
    backend.write(key(1), b"entry")
    own_server.stop()
    own_server.start()
    with pytest.raises(ChunkNotFoundError):
        backend.open(key(1))  # on the connection from before
    backend.write(key(1), b"entry")
    assert content(backend, key(1)) == b"entry"
    assert backend.counts == {}
    backend.close()


def test_a_server_that_is_loading_is_left_alone(tmp_path: Path) -> None:
    with answering(lambda connection: connection.sendall(b"-LOADING Redis is loading the dataset\r\n" * 4)) as url:
        backend = open_storage(url)
        for _ in range(3):
            with pytest.raises(ConnectionError):
                backend.get_record(key(1))
        assert backend.counts == {"failures": 3, "opened": 1}
        backend.close()


# --- several processes ---


def write_many(url: str, version: int) -> None:
    """Run in a process of its own."""
    backend = open_storage(url)
    for _ in range(30):
        backend.write(key(1), bytes([version]) * 50_000, b"label")
    backend.put_record(key(2), bytes([version]))
    backend.link(f"doc {version}", [key(1), key(10 + version)])
    backend.close()


def test_two_processes_write_one_entry_one_record_and_links(server: Server, prefix: str, backend: RedisBackend) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(f"{server.url}?prefix={prefix}", i)) for i in range(2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        with contextlib.suppress(ChunkNotFoundError):
            seen.add(content(backend, key(1)))
        time.sleep(0.002)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {bytes([i]) * 50_000 for i in range(2)}
    assert content(backend, key(1)) in {bytes([i]) * 50_000 for i in range(2)}
    assert backend.get_record(key(2)) in (b"\0", b"\1")
    assert backend.needed_only_by({"doc 0"}) == [key(10)]
    assert backend.needed_only_by({"doc 0", "doc 1"}) == sorted([key(1), key(10), key(11)])


def test_a_forked_process_uses_connections_of_its_own(backend: RedisBackend) -> None:
    backend.write(key(1), LARGE)
    child = os.fork()
    if child == 0:
        good = all(content(backend, key(1)) == LARGE for _ in range(50))
        os._exit(0 if good else 1)
    good = all(content(backend, key(1)) == LARGE for _ in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert good


# --- URLs ---


@pytest.mark.parametrize("scheme", ["redis", "REDIS", "valkey"])
def test_schemes(server: Server, prefix: str, scheme: str) -> None:
    backend = open_storage(f"{scheme}://localhost:{server.port}?prefix={prefix}")
    assert isinstance(backend, RedisBackend)
    backend.write(key(1), b"x")
    assert key(1) in backend
    backend.close()


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_is_never_left_out(server: Server, scheme: str) -> None:
    backend = open_storage(f"{scheme}://localhost:{server.port}?write_deadline_s=1")
    with pytest.raises(OSError):  # this server knows none
        backend.write(key(1), b"x")
    backend.close()


def test_the_database_of_the_url_is_used(server: Server, prefix: str) -> None:
    one, two = (open_storage(f"redis://127.0.0.1:{server.port}/{db}?prefix={prefix}") for db in (1, 2))
    one.write(key(1), b"x")
    assert key(1) not in two
    one.close()
    two.close()


def test_the_password_of_the_url_is_used_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, "--requirepass", "p@ss/word") as server:
        backend = open_storage(f"redis://:p%40ss%2Fword@127.0.0.1:{server.port}/0")
        backend.write(key(1), b"x")
        assert key(1) in backend
        backend.close()
        errors = []
        for url in (f"redis://:s3cret@127.0.0.1:{server.port}", f"redis://joe:s3cret@127.0.0.1:{server.port}"):
            backend = open_storage(url)
            for _ in range(4):
                with pytest.raises(ConnectionError) as error:
                    backend.open(key(1))
                errors.append(str(error.value))
            backend.close()
        with pytest.raises(OSError, match=r"[Aa]uthentication"):
            open_storage(f"redis://127.0.0.1:{server.port}").open(key(1))
    assert "s3cret" not in "".join(errors) + caplog.text


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://", "HOST"),
        ("redis:///0", "HOST"),
        ("redis://:s3cret@", "HOST"),
        ("redis://host/name", "HOST"),
        ("redis://host:port", "HOST"),
        ("redis://host:99999", "HOST"),
        ("redis://joe:s3cret", "HOST"),
        ("redis://:s3cret@[host", "HOST"),
        ("redis://:s3c℀ret@host", "HOST"),
        ("redis://:s3c#ret@host", "HOST"),
        ("redis://host/0#1", "%23"),
        ("redis://host?prefx=a", "prefx"),
        ("redis://host?prefix=a*", "prefix"),
        ("redis://host?prefix=", "prefix"),
        ("redis://host?deadline_s=fast", "deadline_s=fast is not a number"),
        ("redis://host?deadline_s=0", "deadlines"),
        ("redis://host?write_deadline_s=nan", "deadlines"),
        ("redis://host?expire_s=1.5", "expire_s"),
        ("redis://host?socket_timeout=soon", "socket_timeout"),
        ("valkey://", "HOST"),
        ("rediss://?x=1", "HOST"),
    ],
)
def test_a_url_of_no_use_is_refused_with_advice(url: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as error:
        open_storage(url)
    assert "s3c" not in str(error.value)


@pytest.mark.parametrize("prefix", ["", "a*", "a b", "a[b]", ":a", "a:", "a::b", "ä"])
def test_a_prefix_that_would_mean_something_to_redis_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        RedisBackend("redis://host", prefix)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "rag_blend.storage.redis")
    monkeypatch.delattr(rag_blend.storage, "redis")
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[redis\]"'):
        open_storage("redis://host")


# --- an engine ---


def test_answers_from_redis_are_those_from_memory(
    make_engine: Callable[..., BlendEngine], texts: list[str], server: Server, prefix: str
) -> None:
    head, question = "Read this.\n", "\nWhich river?"
    answers = []
    for storage in (None, f"{server.url}?prefix={prefix}", f"{server.url}?prefix={prefix}"):
        engine = make_engine(storage=storage)
        if engine.num_chunks == 0:
            engine.ingest(texts, head=head, progress=False)
        answer = engine.generate(head + "\n".join(texts[:3]) + question, max_new_tokens=8)
        assert answer.stats.reused_tokens > 0
        answers.append(answer.token_ids)
    assert answers[0] == answers[1] == answers[2]
