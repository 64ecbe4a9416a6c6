"""Faults of a store, planted under a running engine: what is broken, how, and what must be counted.

`tests/test_faults.py` runs each of them; `python tests/faults.py` writes what was seen to docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from conftest import random_model, random_text, small_tokenizer
from servers import ACCESS_KEY, SECRET_KEY, Server, redis_server, s3_server

from rag_blend import BlendEngine, GenerationCancelledError, Prefill
from rag_blend.chunk import GENERIC_HEAD, ChunkKV, LayerKV, chunk_key
from rag_blend.codecs import codec_of
from rag_blend.entry import encode_entry
from rag_blend.label import label_of, read_label
from rag_blend.storage.disk import DiskBackend

TEXTS = [random_text(seed) for seed in range(4)]
PROMPT = "Answer from the water and light below.\n" + "\n\n".join(TEXTS) + "\n\nwhich river?\n"
DEADLINE_S = 1.0  # the default of a remote store's calls
SLACK_S = 4.0  # a machine under test is busy
MANY = 10_000

Plant = Callable[[Any], AbstractContextManager[None]]
Ask = Callable[[BlendEngine, str], tuple[Prefill, float]]


def _ask(engine: BlendEngine, storage: str) -> tuple[Prefill, float]:
    started = time.perf_counter()
    prefill = engine.prefill(PROMPT)
    return prefill, time.perf_counter() - started


def _cancel_and_ask(engine: BlendEngine, storage: str) -> tuple[Prefill, float]:
    """The answer is the next request's; the time is that until the cancelled one has returned."""
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    started = time.perf_counter()
    try:
        engine.generate(PROMPT, 2, cancel=cancel)
    except GenerationCancelledError:
        seconds = time.perf_counter() - started
    else:
        raise AssertionError("it was answered, so nothing hung")
    return engine.prefill(PROMPT), seconds


def _open_and_ask(engine: BlendEngine, storage: str) -> tuple[Prefill, float]:
    """The answer is that of another engine on the same store; the time is that until it was open, the best of three."""
    best = float("inf")
    for _ in range(3):
        model, tokenizer = random_model(), small_tokenizer()
        started = time.perf_counter()
        with BlendEngine(model, tokenizer, storage, prime="none", prefix_cache_bytes=0, reuse_when="possible") as other:
            best = min(best, time.perf_counter() - started)
            assert other.num_chunks == engine.num_chunks + MANY
            prefill = other.prefill(PROMPT)
    return prefill, best


@dataclass(frozen=True)
class Fault:
    """One way for a store to fail.

    Attributes:
        name: What is wrong, for the report.
        medium: ``"disk"``, ``"redis"`` or ``"s3"``.
        plant: Given the directory or the server, breaks it for as long as the context lasts.
        counter: Which of the engine's counters must move; None: nothing is lost.
        reingest: Whether the chunks have to be ingested again afterwards.
        ask: What is done meanwhile, and timed.
        within_s: How long that may take.
    """

    name: str
    medium: str
    plant: Plant
    counter: str | None
    reingest: bool = True
    ask: Ask = _ask
    within_s: float = DEADLINE_S + SLACK_S


@dataclass(frozen=True)
class Outcome:
    """What an engine made of it.

    Attributes:
        same_answer: Its logits were those of full prefill, bit for bit; where nothing was lost, of an unbroken store.
        seconds: How long what `Fault.ask` did took; the model's own time is a few milliseconds.
        counted: How far the counter moved.
        reused_tokens: Tokens reused by the same engine when the fault was over.
    """

    same_answer: bool
    seconds: float
    counted: int
    reused_tokens: int


def observe(fault: Fault, where: Any, storage: str) -> Outcome:
    """Plant a fault under an engine with four stored chunks, ask, take the fault away and ask again."""
    with BlendEngine(
        random_model(), small_tokenizer(), storage, prime="none", prefix_cache_bytes=0, reuse_when="possible"
    ) as engine:
        # So small a model computes its prompts in no time, and would hardly wait for a server: let it not know.
        engine._control.learn_full = lambda tokens, seconds: None  # type: ignore[method-assign]
        engine.ingest(TEXTS, progress=False)
        unbroken = engine.prefill(PROMPT)
        assert unbroken.stats.hits == 4
        expected = unbroken if fault.counter is None else engine.prefill(PROMPT, reuse=False)
        counted = engine.counts().get(fault.counter or "", 0)
        with fault.plant(where):
            prefill, seconds = fault.ask(engine, storage)
            counted = engine.counts().get(fault.counter or "", 0) - counted
        if fault.medium == "disk":
            reused = _reused(engine, fault)
        else:  # a server that failed is left alone for 5 s, and one that just woke up may be slow for a while
            reused = next((n for _ in range(5) if not time.sleep(5.2) and (n := _reused(engine, fault))), 0)
        return Outcome(torch.equal(prefill.logits, expected.logits), seconds, counted, reused)


def _reused(engine: BlendEngine, fault: Fault) -> int:
    if fault.reingest:
        engine.ingest(TEXTS, progress=False)
    return engine.prefill(PROMPT).stats.reused_tokens


@contextlib.contextmanager
def place_of(fault: Fault, directory: Path) -> Iterator[tuple[Any, str]]:
    """What `Fault.plant` gets, and the storage URL."""
    if fault.medium == "disk":
        yield directory / "kv", str(directory / "kv")
        return
    make = redis_server if fault.medium == "redis" else s3_server
    credentials = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with make(directory) as server, mock.patch.dict(os.environ, credentials):
        yield server, server.url


# --- on disk ---


def _each_entry(change: Callable[[Path], object]) -> Plant:
    @contextlib.contextmanager
    def plant(directory: Path) -> Iterator[None]:
        paths = sorted(directory.glob("??/*.safetensors"))
        assert len(paths) == 4
        for path in paths:
            change(path)
        yield

    return plant


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _layers_start(path: Path) -> int:
    """Where the two layers begin: they are alike, and they are last."""
    layer = 2 * 2 * 16 * 2  # keys and values, heads, head_dim, bytes
    size = path.stat().st_size
    tokens = (size - _header_bytes(path)) // (2 * layer + 4)
    return size - 2 * layer * tokens


def _cut(at: Callable[[Path], int]) -> Plant:
    return _each_entry(lambda path: os.truncate(path, at(path)))


def _flip(at: Callable[[Path], int]) -> Plant:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at(path)] ^= 0x10
        path.write_bytes(data)

    return _each_entry(change)


def _lie_about_the_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])


def _swap(directory: Path) -> AbstractContextManager[None]:
    """Entries under each other's names."""
    paths = sorted(directory.glob("??/*.safetensors"))
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    return contextlib.nullcontext()


def _replace_by(make: Callable[[Path], object]) -> Plant:
    return _each_entry(lambda path: (path.unlink(), make(path)))


@contextlib.contextmanager
def _io_error(directory: Path) -> Iterator[None]:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with mock.patch("os.preadv", fail):
        yield


@contextlib.contextmanager
def _hanging(directory: Path) -> Iterator[None]:
    """As a network file system whose server is away."""
    usual, awake = os.preadv, threading.Event()

    def read(*args: Any) -> int:
        awake.wait()
        return usual(*args)

    with mock.patch("os.preadv", read):
        try:
            yield
        finally:
            awake.set()
    while any(thread.name.startswith(("rag-blend-open", "rag-blend-reader")) for thread in threading.enumerate()):
        time.sleep(0.01)


@contextlib.contextmanager
def _crowded(directory: Path) -> Iterator[None]:
    """Many more entries of the same model, small but for their ids."""
    backend = DiskBackend(directory)
    key, label = next(backend.labels())
    listed = read_label(label, key)
    assert listed is not None
    origin = replace(listed.origin, head=GENERIC_HEAD)
    nothing = [LayerKV(*torch.zeros(2, 1, 512, 1))]
    labels = {}
    for ids in np.random.default_rng(0).integers(0, 512, (MANY, 512), dtype=np.int32):
        path = backend._layout.entry(chunk_key(origin, ids))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(encode_entry(ChunkKV(origin, ids, nothing), torch.float16, codec_of("raw")))
        labels[path.name] = label_of(origin, ids)
    backend._index.update(labels, labels)
    backend.close()
    yield


@contextlib.contextmanager
def _deleted_while_read(directory: Path) -> Iterator[None]:
    """As another process's eviction does it: the files are open, so they are read to their end."""
    from rag_blend.prefetch import LayerPrefetcher

    usual = LayerPrefetcher.layer

    def layer(prefetcher: LayerPrefetcher, layer_idx: int) -> Any:
        for path in directory.glob("??/*.safetensors"):
            path.unlink()
        return usual(prefetcher, layer_idx)

    with mock.patch.object(LayerPrefetcher, "layer", layer):
        yield


@contextlib.contextmanager
def _clock_off(directory: Path, seconds: float) -> Iterator[None]:
    now = time.time
    with mock.patch("time.time", lambda: now() + seconds):
        yield


DISK = [
    Fault("entry deleted", "disk", _each_entry(os.unlink), "missing"),
    Fault("entry empty", "disk", _cut(lambda path: 0), "corrupt"),
    Fault("cut inside the length of the header", "disk", _cut(lambda path: 5), "corrupt"),
    Fault("cut inside the header", "disk", _cut(lambda path: _header_bytes(path) // 2), "corrupt"),
    Fault("cut behind the header", "disk", _cut(_header_bytes), "corrupt"),
    Fault("cut inside the first layer", "disk", _cut(lambda path: _layers_start(path) + 9), "corrupt"),
    Fault("cut by the last byte", "disk", _cut(lambda path: path.stat().st_size - 1), "corrupt"),
    Fault("one bit flipped in the length of the header", "disk", _flip(lambda path: 1), "corrupt"),
    Fault("one bit flipped in the header", "disk", _flip(lambda path: _header_bytes(path) // 2), "corrupt"),
    Fault("one bit flipped in the token ids", "disk", _flip(lambda path: _layers_start(path) - 3), "corrupt"),
    Fault("one bit flipped in the first layer", "disk", _flip(lambda path: _layers_start(path) + 40), "corrupt"),
    Fault("one bit flipped in the last layer", "disk", _flip(lambda path: path.stat().st_size - 1), "corrupt"),
    Fault("header of 2^62 bytes", "disk", _each_entry(_lie_about_the_header), "corrupt"),
    Fault("entries under each other's names", "disk", _swap, "corrupt"),
    Fault("garbage", "disk", _each_entry(lambda path: path.write_bytes(os.urandom(5000))), "corrupt"),
    Fault("a directory where an entry was", "disk", _replace_by(os.mkdir), "corrupt"),
    Fault("a FIFO where an entry was", "disk", _replace_by(os.mkfifo), "corrupt"),
    Fault("EIO on every read", "disk", _io_error, "unavailable", reingest=False),
    Fault("reads hang", "disk", _hanging, "unavailable", reingest=False),
    Fault("reads hang, a request is cancelled", "disk", _hanging, "unavailable", reingest=False, ask=_cancel_and_ask),
    Fault("entries deleted while they are read", "disk", _deleted_while_read, None),
    Fault("clock a year ahead", "disk", lambda path: _clock_off(path, 3.2e7), None, reingest=False),
    Fault("clock a year behind", "disk", lambda path: _clock_off(path, -3.2e7), None, reingest=False),
    Fault(f"{MANY:,} entries are opened", "disk", _crowded, None, reingest=False, ask=_open_and_ask, within_s=1.0),
]


# --- on servers ---


@contextlib.contextmanager
def _down(server: Server) -> Iterator[None]:
    server.stop()
    yield
    server.start()


@contextlib.contextmanager
def _paused(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


def _redis_entries(change: Callable[[Any, bytes], object]) -> Plant:
    @contextlib.contextmanager
    def plant(server: Server) -> Iterator[None]:
        import redis

        client = redis.Redis.from_url(server.url)
        names = list(client.scan_iter("*:entry:*"))
        assert len(names) == 4
        for name in names:
            change(client, name)
        client.close()
        yield

    return plant


def _cut_value(client: Any, name: bytes) -> None:
    client.set(name, client.get(name)[:-100])


SERVERS = [
    Fault("Redis stopped, and started again empty", "redis", _down, "unavailable"),
    Fault("Redis paused", "redis", _paused, "unavailable", reingest=False),
    Fault("Redis has evicted the entries", "redis", _redis_entries(lambda c, name: c.delete(name)), "missing"),
    Fault("values truncated in Redis", "redis", _redis_entries(_cut_value), "corrupt"),
    Fault("S3 stopped, and started again", "s3", _down, "unavailable", reingest=False),
    Fault("S3 paused", "s3", _paused, "unavailable", reingest=False),
]

ALL = [*DISK, *SERVERS]


# --- the report ---

_TABLE = re.compile(r"(?<=<!-- faults -->\n).*(?=<!-- end -->)", re.DOTALL)


def write_report(page: Path) -> None:
    """Run all faults and put what was seen into the page, between its two marks."""
    rows = ["| what is broken | answer | counted as | time | reused afterwards |", "|---|---|---|---|---|"]
    for fault in ALL:
        with tempfile.TemporaryDirectory() as directory, place_of(fault, Path(directory)) as (where, storage):
            outcome = observe(fault, where, storage)
        expected = "that of an unbroken store" if fault.counter is None else "that of full prefill"
        rows.append(
            f"| {fault.name} | {expected if outcome.same_answer else '**wrong**'} "
            f"| {f'{fault.counter}: {outcome.counted}' if fault.counter else 'nothing'} | {outcome.seconds:.2f} s "
            f"| {outcome.reused_tokens} tokens{', after ingesting again' if fault.reingest else ''} |"
        )
    page.write_text(_TABLE.sub(lambda _: "\n".join(rows) + "\n", page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    write_report(Path(__file__).parent.parent / "docs" / "reliability.md")
