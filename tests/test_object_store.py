"""ObjectStoreBackend in memory, on a real S3 server, and on servers that misbehave."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from contracts.storage import StorageContract, content, forget, key
from servers import ACCESS_KEY, SECRET_KEY, Server, free_ports, is_noticed_at_once, s3_server, took

import rag_blend.storage
from rag_blend import BlendEngine
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError
from rag_blend.storage import StorageBackend, _blocks, _guard, open_storage

obstore = pytest.importorskip("obstore")

from obstore.store import MemoryStore  # noqa: E402

from rag_blend.storage import object_store as module  # noqa: E402
from rag_blend.storage.object_store import ObjectStoreBackend  # noqa: E402

SOON = 5.0  # on a busy machine; a call that does not end at its deadline takes a minute here
LARGE = os.urandom(3 * 4096)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    """A place of its own for each test."""
    return server.url.replace("?", f"/tests/{secrets.token_hex(8)}?") + "&deadline_s=10"


@pytest.fixture
def s3(url: str) -> Iterator[StorageBackend]:
    backend = open_storage(url)
    yield backend
    backend.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def memory(store: MemoryStore) -> Iterator[ObjectStoreBackend]:
    backend = ObjectStoreBackend(store, "some/prefix")
    yield backend
    backend.close()


@pytest.fixture(params=["memory", "s3"])
def backend(request: pytest.FixtureRequest) -> StorageBackend:
    found: StorageBackend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(module, "FIRST_BYTES", 1024)


def names(store: MemoryStore) -> list[str]:
    """All objects there are."""
    return sorted(meta["path"] for page in obstore.list(store) for meta in page)


class TestObjectStoreInMemory(StorageContract):
    @pytest.fixture
    def backend(self, memory: ObjectStoreBackend) -> StorageBackend:
        return memory


class TestS3(StorageContract):
    @pytest.fixture
    def backend(self, s3: StorageBackend) -> StorageBackend:
        return s3


# --- what is in the bucket ---


def test_the_names_of_objects(memory: ObjectStoreBackend, store: MemoryStore) -> None:
    memory.write(key(1), b"entry", b"label")
    memory.write(key(3), b"entry")
    memory.write(key(4), b"damaged")
    memory.quarantine(key(4))
    memory.put_record(key(2), b"record")
    memory.link("a document", [key(1)])
    (digest,) = (name.split("/")[3] for name in names(store) if "/documents/" in name)
    assert names(store) == sorted(
        f"some/prefix/{name}"
        for name in (
            f"entries/{key(1)[:2]}/{key(1)}.safetensors",
            f"labels/{key(1)[:2]}/{key(1)}",
            f"entries/{key(3)[:2]}/{key(3)}.safetensors",
            f"bad/{key(4)[:2]}/{key(4)}.safetensors",
            f"records/{key(2)}.json",
            f"documents/{digest}/{key(1)}",
            f"needs/{key(1)}/{digest}",
        )
    )
    assert bytes(obstore.get(store, f"some/prefix/entries/{key(1)[:2]}/{key(1)}.safetensors").bytes()) == b"entry"


def test_deleting_leaves_nothing(memory: ObjectStoreBackend, store: MemoryStore) -> None:
    memory.write(key(1), b"entry", b"label")
    memory.write(key(2), b"entry", b"label")
    memory.quarantine(key(2))
    memory.link("a", [key(1), key(2)])
    assert b"entry" in {bytes(obstore.get(store, name).bytes()) for name in names(store) if "/bad/" in name}
    assert memory.delete(key(1)) is True
    assert memory.delete(key(2)) is False
    memory.unlink({"a"})
    assert names(store) == []  # a label reveals the text as well


def test_labels_come_back_and_a_lost_one_is_empty(backend: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    monkeypatch.setattr(module, "_PAGE", 10)
    for i in range(25):
        backend.write(key(i), b"x" * i, b"label %d" % i)
    backend.write(key(3), b"xxx")
    listed = list(backend.labels())
    assert len(listed) == 25
    assert dict(listed) == {key(i): b"label %d" % i if i != 3 else b"" for i in range(25)}
    assert (backend.stats().entries, backend.stats().bytes) == (25, sum(range(25)))


def test_prefixes_do_not_meet(store: MemoryStore) -> None:
    backends = [ObjectStoreBackend(store, prefix) for prefix in ("", "a", "a/b", "entries")]
    for i, backend in enumerate(backends):
        backend.write(key(i), b"x")
        backend.put_record(key(i), b"x")
        backend.link("doc", [key(i)])
    for i, backend in enumerate(backends):
        assert list(backend.keys()) == list(backend.records()) == backend.needed_only_by({"doc"}) == [key(i)]
        backend.close()


def test_other_people_s_objects_are_not_ours(memory: ObjectStoreBackend, store: MemoryStore) -> None:
    memory.write(key(1), b"x")
    for name in ("README", f"{key(2)}.txt", f"{key(2)[:-1]}.safetensors", f"{key(2)}.safetensors.tmp"):
        obstore.put(store, f"some/prefix/entries/ab/{name}", b"y")
    assert list(memory.keys()) == [key(1)]
    assert memory.stats().bytes == 1


def test_links_of_many_entries(backend: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    backend.link("a", map(key, range(20)))
    backend.link("b", map(key, range(15, 25)))
    assert backend.needed_only_by({"a"}) == sorted(map(key, range(15)))
    assert forget(backend, "b") == sorted(map(key, range(20, 25)))
    assert forget(backend, "a") == sorted(map(key, range(20)))


def test_a_link_that_is_only_half_there_lets_the_entry_be_deleted(
    memory: ObjectStoreBackend, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a writer or an eraser that was killed in between: nothing stays that no document can erase."""
    memory.link("a", [key(1)])
    memory.link("b", [key(1)])
    put = module._put_empty

    def killed(store: MemoryStore, name: str) -> None:
        if "/needs/" in name:
            raise OSError("killed")
        put(store, name)

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(module, "_put_empty", killed)
        memory.link("c", [key(1), key(2)])
    assert memory.needed_only_by({"c"}) == [key(2)]
    assert memory.needed_only_by({"a", "b"}) == [key(1)]
    (digest,) = (name.split("/")[3] for name in names(store) if name.endswith(key(2)))
    memory.unlink({"a"})
    assert memory.needed_only_by({"b"}) == [key(1)]
    memory.unlink({"b", "c"})
    assert names(store) == []
    assert digest


def test_what_cannot_be_a_key_is_not_linked(memory: ObjectStoreBackend, store: MemoryStore) -> None:
    with pytest.raises(ValueError):
        memory.link("a", [key(1), "../x"])
    assert names(store) == []


# --- replaced, damaged, erased ---


@pytest.mark.usefixtures("small_blocks")
def test_a_large_entry_is_read_in_blocks_of_one_version(backend: StorageBackend) -> None:
    backend.write(key(1), LARGE)
    assert content(backend, key(1)) == LARGE
    for change in (lambda: backend.write(key(1), LARGE[::-1]), lambda: backend.delete(key(1))):
        backend.write(key(1), LARGE)
        with backend.open(key(1)) as reader:
            assert reader.read(5000, 3000).tobytes() == LARGE[5000:8000]
            change()
            with pytest.raises(OSError, match="deleted or replaced") as error:
                reader.read(9500, 100)
            assert error.value.errno == errno.ESTALE  # no damage: the new one must not be set aside
            assert reader.read(0, 9000).tobytes() == LARGE[:9000]  # what came before is whole


def test_a_full_or_read_only_bucket_is_no_reason_to_stop_reading(
    store: MemoryStore, memory: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: object, **__: object) -> None:
        raise obstore.exceptions.PermissionDeniedError("not allowed")

    memory.write(key(1), b"x")
    monkeypatch.setattr(obstore, "put", put)
    for _ in range(5):
        with pytest.raises(OSError, match="not allowed"):
            memory.write(key(2), b"x")
    assert content(memory, key(1)) == b"x"
    assert memory.counts == {"denied": 5}


def test_wrong_credentials_are_an_error_without_the_signature(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    backend = open_storage(url)
    for call in (lambda: backend.open(key(1)), lambda: backend.write(key(1), b"x"), lambda: list(backend.keys())):
        with pytest.raises(OSError) as error:
            call()
        assert "\n" not in str(error.value)
        assert "?" not in str(error.value)
    assert "wrong-secret" not in caplog.text
    assert backend.counts == {"denied": 3}
    backend.close()


# --- a server that is down, silent or wrong ---


def test_a_server_that_is_down_is_noticed_at_once() -> None:
    is_noticed_at_once(open_storage(f"s3://bucket?endpoint=http://127.0.0.1:{free_ports(1)[0]}"), OSError)


def test_a_silent_server_costs_one_deadline_and_is_used_again_when_it_speaks(
    server: Server, url: str, s3: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "PAUSE_S", 1.0)
    s3.write(key(1), b"entry")
    backend = open_storage(url.replace("deadline_s=10", "deadline_s=0.3"))
    server.pause()
    try:
        assert 0.3 <= took(lambda: backend.open(key(1)), TimeoutError) < SOON
        refused = [took(lambda: backend.open(key(1)), ConnectionError) for _ in range(20)]
        assert sorted(refused)[10] < 0.01
    finally:
        server.resume()
    give_up = time.monotonic() + 30.0
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            assert content(backend, key(1)) == b"entry"
            break
        time.sleep(0.2)
    assert content(backend, key(1)) == b"entry"
    assert backend.counts["timeouts"] >= 1
    backend.close()


class FakeS3:
    """A server whose answers a test writes itself.

    Attributes:
        answer: Called with the request; writes the response.
        requests: Method, path and headers of what was asked.
    """

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda request: request.send_error(500)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.stop = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.requests.append((self.command, {name.lower(): value for name, value in self.headers.items()}))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with contextlib.suppress(OSError):
                    fake.answer(self)
                self.close_connection = True

            do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return None

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"s3://bucket?endpoint=http://127.0.0.1:{self.http.server_port}&deadline_s=0.5&write_deadline_s=0.8"


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    fake = FakeS3()
    thread = threading.Thread(target=fake.http.serve_forever, args=(0.05,))
    thread.start()
    yield fake
    fake.stop.set()
    fake.http.shutdown()
    thread.join()
    fake.http.server_close()


@pytest.fixture
def faked(fake: FakeS3) -> Iterator[StorageBackend]:
    backend = open_storage(fake.url)
    yield backend
    backend.close()


def part(
    request: BaseHTTPRequestHandler, body: bytes, total: int, promised: int | None = None, tag: str = '"v1"'
) -> None:
    """A response to a GET of a range: `body`, of which `promised` bytes were announced."""
    begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
    length = len(body) if promised is None else promised
    request.send_response(206)
    request.send_header("Content-Range", f"bytes {begin}-{begin + length - 1}/{total}")
    request.send_header("Content-Length", str(length))
    request.send_header("Connection", "close")
    request.send_header("ETag", tag)
    request.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
    request.end_headers()
    request.wfile.write(body)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_server_error_is_an_error_and_is_not_tried_again(fake: FakeS3, faked: StorageBackend, status: int) -> None:
    fake.answer = lambda request: request.send_error(status)
    assert took(lambda: faked.get_record(key(1)), OSError) < SOON
    assert len(fake.requests) == 1
    assert took(lambda: faked.open(key(1)), OSError) < SOON
    assert took(lambda: faked.write(key(1), b"x"), OSError) < SOON
    with pytest.raises(ConnectionError, match="not asked"):
        faked.open(key(1))


def test_not_found_is_no_error(fake: FakeS3, faked: StorageBackend) -> None:
    fake.answer = lambda request: request.send_error(404)
    for _ in range(5):
        with pytest.raises(ChunkNotFoundError):
            faked.open(key(1))
        assert faked.get_record(key(1)) is None
        assert key(1) not in faked
        faked.quarantine(key(1))
    assert faked.counts == {}


def test_a_body_that_ends_early_is_an_error(fake: FakeS3, faked: StorageBackend) -> None:
    fake.answer = lambda request: part(request, b"0123", total=10, promised=10)
    start = time.monotonic()
    with pytest.raises((OSError, CorruptChunkError)):
        faked.open(key(1))
    assert time.monotonic() - start < SOON


def test_a_body_that_trickles_costs_one_deadline(fake: FakeS3, faked: StorageBackend) -> None:
    def trickle(request: BaseHTTPRequestHandler) -> None:
        part(request, b"", total=10_000, promised=10_000)
        while not fake.stop.wait(0.02):
            request.wfile.write(b"x")

    fake.answer = trickle
    assert 0.5 <= took(lambda: faked.open(key(1)), TimeoutError) < SOON
    assert took(lambda: faked.open(key(1)), ConnectionError) < 1.0


@pytest.mark.parametrize("call", ["open", "write", "keys", "link"])
def test_a_server_that_never_answers_costs_one_deadline(fake: FakeS3, faked: StorageBackend, call: str) -> None:
    fake.answer = lambda request: fake.stop.wait(60.0) and None
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: faked.open(key(1)),
        "write": lambda: faked.write(key(1), b"x"),
        "keys": lambda: list(faked.keys()),
        "link": lambda: faked.link("a", [key(1)]),
    }
    assert 0.5 <= took(calls[call], TimeoutError) < SOON


@pytest.mark.parametrize(("body", "total"), [(b"0123", 10), (b"0123456789", 5), (b"", 5), (b"0123", 0)])
def test_a_range_that_was_not_asked_for_is_an_error(
    fake: FakeS3, faked: StorageBackend, body: bytes, total: int
) -> None:
    fake.answer = lambda request: part(request, body, total)
    with pytest.raises((OSError, CorruptChunkError)), faked.open(key(1)) as reader:
        reader.read(0, 5)


@pytest.mark.usefixtures("small_blocks")
def test_a_server_that_knows_no_conditions_does_not_mix_versions(fake: FakeS3, faked: StorageBackend) -> None:
    tags = ['"v1"', '"v1"', '"v2"']

    def answer(request: BaseHTTPRequestHandler) -> None:
        begin, end = (int(x) for x in request.headers["Range"].removeprefix("bytes=").split("-"))
        part(request, LARGE[begin : end + 1], total=len(LARGE), tag=tags.pop(0))

    fake.answer = answer
    with faked.open(key(1)) as reader:
        assert reader.read(2000, 100).tobytes() == LARGE[2000:2100]
        with pytest.raises(OSError, match="replaced"):
            reader.read(6000, 100)
    assert [headers.get("if-match") for _, headers in fake.requests] == [None, '"v1"', '"v1"']


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_ends_early_is_an_error(fake: FakeS3, faked: StorageBackend) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        begin, end = (int(x) for x in request.headers["Range"].removeprefix("bytes=").split("-"))
        part(request, LARGE[begin : min(end + 1, 3000)], total=len(LARGE), promised=end + 1 - begin)

    fake.answer = answer
    with faked.open(key(1)) as reader, pytest.raises((CorruptChunkError, OSError)):
        reader.read(2000, 100)


@pytest.mark.usefixtures("small_blocks")
def test_an_absurd_size_is_damage_and_reserves_nothing(fake: FakeS3, faked: StorageBackend) -> None:
    fake.answer = lambda request: part(request, LARGE[:1024], total=1 << 60)
    with pytest.raises(CorruptChunkError, match=str(1 << 60)):
        faked.open(key(1))


@pytest.mark.parametrize("body", [b"", b"<html>", b"<ListBucketResult>", b"\0\xff"])
def test_a_listing_that_is_nonsense_is_an_error(fake: FakeS3, faked: StorageBackend, body: bytes) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Connection", "close")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    fake.answer = answer
    assert took(lambda: list(faked.keys()), OSError) < SOON


def test_a_panic_of_the_library_is_an_error(memory: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def get(*_: object, **__: object) -> None:
        raise PanicException("called `unwrap()` on a `None` value")

    monkeypatch.setattr(obstore, "get", get)
    with pytest.raises(OSError, match="unwrap"):
        memory.open(key(1))


# --- several processes ---


# Only the storage part of the package: the rest takes seconds to import.
PREAMBLE = f"""
import os, sys, time, types
sys.modules["rag_blend"] = types.ModuleType("rag_blend")
sys.modules["rag_blend"].__path__ = [{str(Path(rag_blend.__file__).parent)!r}]
from rag_blend.storage import open_storage

def key(i):
    return f"{{i:064x}}"
"""
WRITING = """
backend, i = open_storage(sys.argv[1]), int(sys.argv[2])
for _ in range(10):
    backend.write(key(1), bytes([i]) * 50_000, b"label")
backend.put_record(key(2), bytes([i]))
backend.link(f"doc {i}", [key(1), key(10 + i)])
backend.close()
"""
FORKING = """
backend = open_storage(sys.argv[1])
if sys.argv[2] == "used before":
    backend.write(key(1), b"x")
child = os.fork()
if child == 0:
    start = time.monotonic()
    try:
        backend.write(key(2), b"x")
        result = "worked"
    except OSError as error:
        result = str(error)
    print(result if time.monotonic() - start < 5 else "slow", flush=True)
    os._exit(0)
os.waitpid(child, 0)
backend.write(key(3), b"x")
print("parent worked")
"""


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_write_one_entry_one_record_and_links(url: str, s3: StorageBackend) -> None:
    def name(i: int) -> str:
        return f"{i:064x}"

    writers = [started(WRITING, url, str(i)) for i in range(2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        with contextlib.suppress(ChunkNotFoundError):
            seen.add(content(s3, name(1)))
        time.sleep(0.02)
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert seen <= {bytes([i]) * 50_000 for i in range(2)}
    assert content(s3, name(1)) in {bytes([i]) * 50_000 for i in range(2)}
    assert s3.get_record(name(2)) in (b"\0", b"\1")
    assert s3.needed_only_by({"doc 0"}) == [name(10)]
    assert s3.needed_only_by({"doc 0", "doc 1"}) == sorted([name(1), name(10), name(11)])


@pytest.mark.parametrize(
    ("used", "child"),
    [("used before", "an object store that was used before a fork cannot be used after it"), ("not used", "worked")],
)
def test_a_forked_process_works_or_says_at_once_why_not(url: str, used: str, child: str) -> None:
    output, errors = started(FORKING, url, used).communicate(timeout=100)
    assert output.splitlines()[0].startswith(child), errors
    assert output.splitlines()[1:] == ["parent worked"]


# --- URLs ---


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:s3cret@bucket/prefix",
        "s3://bucket?access_key_id=AKIA&secret_access_key=s3cret",
        "s3://bucket?aws_secret_access_key=s3cret",
        "s3://bucket?X-Amz-Signature=s3cret",
        "s3://bucket?session_token=s3cret",
        "s3://bucket?endpoint=http://joe:s3cret@host:9000",
        "gs://bucket?service_account_key=s3cret",
        "az://container?sas_token=s3cret",
        "abfss://joe:s3cret@account.dfs.core.windows.net/x",
        "az://container?password=s3cret",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="environment") as error:
        open_storage(url)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://", "s3://BUCKET"),
        ("s3:///prefix", "s3://BUCKET"),
        ("s3://bucket#1", "s3://BUCKET"),
        ("s3://bucket?endpont=http://host", "endpont"),
        ("gs://bucket?region=eu", "region"),
        ("s3://bucket?deadline_s=fast", "deadline_s=fast is not a number"),
        ("s3://bucket?deadline_s=0", "deadlines"),
        ("s3://bucket?write_deadline_s=inf", "deadlines"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3://bucket/a b", "prefix"),
        ("az://container", "Account"),
        ("object_store://", "s3://BUCKET"),
        ("s3://[bucket", "s3://BUCKET"),
        ("object_store://ftp://host", "s3://BUCKET"),
        ("object_store://memory://x", "s3://BUCKET"),
    ],
)
def test_a_url_of_no_use_is_refused_with_advice(url: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=advice):
        open_storage(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/some/prefix/",
        "S3A://bucket",
        "gs://bucket/prefix?endpoint=http://localhost:4443",
        "az://container/prefix?endpoint=https://localhost:10000",
        "abfss://container@account.dfs.core.windows.net/prefix",
    ],
)
def test_clouds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening asks nobody."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("somebody was asked"))
    backend = open_storage(url)
    assert isinstance(backend, ObjectStoreBackend)
    backend.close()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "rag_blend.storage.object_store")
    monkeypatch.delattr(rag_blend.storage, "object_store")
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[s3\]"'):
        open_storage("s3://bucket")


# --- an engine ---


def test_answers_from_s3_are_those_from_memory(
    make_engine: Callable[..., BlendEngine], texts: list[str], url: str
) -> None:
    head, question = "Read this.\n", "\nWhich river?"
    answers = []
    for storage in (None, url, url):
        engine = make_engine(storage=storage)
        if engine.num_chunks == 0:
            engine.ingest(texts, head=head, progress=False)
        answer = engine.generate(head + "\n".join(texts[:3]) + question, max_new_tokens=8)
        assert answer.stats.reused_tokens > 0
        answers.append(answer.token_ids)
    assert answers[0] == answers[1] == answers[2]
