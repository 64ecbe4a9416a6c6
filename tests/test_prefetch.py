from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from conftest import random_model
from contracts.kv import random_chunk

from rag_blend.assembly import LayerAssembler, is_better_beside
from rag_blend.chunk import NO_TOKENS, ChunkKV
from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.plan import BlendPlan, Segment
from rag_blend.prefetch import LayerPrefetcher, LostChunkError
from rag_blend.space import OwnSpace
from rag_blend.storage.disk import DiskBackend
from rag_blend.store import KVStore, StoredChunk

LAYERS, NUM_TOKENS, ROOM = 12, 70, 5
THREAD = "rag-blend-reader"


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return adapter_for(random_model(num_hidden_layers=LAYERS))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    backend = DiskBackend(tmp_path / "kv")
    yield KVStore(backend, "model", "tenant", torch.float32)
    backend.close()


@pytest.fixture
def chunks(store: KVStore, adapter: ModelAdapter) -> dict[str, ChunkKV]:
    origin = store.origin(NO_TOKENS, NO_TOKENS)
    made = [
        random_chunk(
            seed, origin, num_layers=LAYERS, num_heads=adapter.num_kv_heads, head_dim=adapter.head_dim, num_tokens=30
        )
        for seed in range(2)
    ]
    return {store.put(chunk).key: chunk for chunk in made}


@pytest.fixture
def plan(chunks: dict[str, ChunkKV]) -> BlendPlan:
    first, second = chunks
    return BlendPlan(
        NUM_TOKENS,
        (Segment(0, 20, first, 0, True), Segment(25, 45, second, 10, False), Segment(50, 60, first, 20, False)),
    )


@pytest.fixture(params=[True, False], ids=["beside", "in turn"])
def open_prefetcher(
    plan: BlendPlan,
    store: KVStore,
    adapter: ModelAdapter,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., LayerPrefetcher]]:
    monkeypatch.setattr("rag_blend.prefetch.is_better_beside", lambda device: request.param)
    opened = []

    def make(depth: int = 4, plan: BlendPlan = plan) -> LayerPrefetcher:
        angles = adapter.rotary.angles(plan.num_tokens, adapter.device)
        opened.append(LayerPrefetcher(plan, store, adapter, angles, OwnSpace(ROOM), depth))
        return opened[-1]

    yield make
    for prefetcher in opened:
        prefetcher.close()


@pytest.mark.parametrize(("threads", "cores", "beside"), [(2, 2, False), (1, 2, True), (4, 2, False)])
def test_another_thread_assembles_layers_only_where_a_core_is_idle(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, beside: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert is_better_beside(torch.device("cpu")) == beside
    assert is_better_beside(torch.device("cuda"))


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def open_entries() -> int:
    gc.collect()
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sum(".safetensors" in path for path in paths)


def damage_layer(store: KVStore, key: str, layer: int) -> None:
    stored = store.open(key)
    offset = stored.header.offsets[layer]
    stored.close()
    assert isinstance(store.backend, DiskBackend)
    with open(store.backend.directory / key[:2] / f"{key}.safetensors", "r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 4]))


class Gate:
    """Counts the layers read from the store, and can hold the reader back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.open = threading.Event()
        self.open.set()
        real = StoredChunk.layer

        def layer(stored: StoredChunk, layer_idx: int) -> object:
            with self.changed:
                self.read.append((stored.key, layer_idx))
                self.changed.notify_all()
            assert self.open.wait(20)
            return real(stored, layer_idx)

        monkeypatch.setattr(StoredChunk, "layer", layer)

    def layers(self) -> list[int]:
        return list(dict.fromkeys(i for _, i in self.read))

    def wait_until(self, layer: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: layer in self.layers(), 20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_every_layer_has_the_right_rows_at_the_right_positions(
    open_prefetcher: Callable[..., LayerPrefetcher], plan: BlendPlan, adapter: ModelAdapter, chunks: dict[str, ChunkKV]
) -> None:
    prefetcher = open_prefetcher()
    angles = adapter.rotary.angles(NUM_TOKENS, adapter.device)
    for i in range(LAYERS):
        kv = prefetcher.layer(i)
        assert kv.keys.shape == kv.values.shape == (1, adapter.num_kv_heads, NUM_TOKENS + ROOM, adapter.head_dim)
        assert kv.keys.dtype == adapter.dtype
        for segment in plan.segments:
            for n in range(len(segment)):
                stored = chunks[segment.key].layers[i]
                at = segment.start + n
                rotated = adapter.rotary.rotate(
                    stored.keys[None, :, segment.offset + n : segment.offset + n + 1], angles.at(at, at + 1)
                )
                assert torch.allclose(kv.keys[:, :, at : at + 1], rotated, atol=1e-6)
                assert torch.equal(kv.values[0, :, at], stored.values[:, segment.offset + n])
    assert prefetcher.load_s > 0


def test_the_callers_layers_are_its_own(
    open_prefetcher: Callable[..., LayerPrefetcher], plan: BlendPlan, chunks: dict[str, ChunkKV]
) -> None:
    first = open_prefetcher()
    first.layer(0).values.fill_(7.0)
    key = plan.segments[0].key
    assert torch.equal(open_prefetcher().layer(0).values[0, :, :20], chunks[key].layers[0].values[:, :20])


def test_layers_are_read_in_order_once_and_ahead(
    open_prefetcher: Callable[..., LayerPrefetcher], gate: Gate, plan: BlendPlan
) -> None:
    prefetcher = open_prefetcher()
    for i in range(LAYERS):
        prefetcher.layer(i)
    assert gate.layers() == list(range(LAYERS))
    assert len(gate.read) == LAYERS * len(plan.keys)  # once each, though one chunk has two segments


def test_layers_are_assembled_where_it_was_decided(
    open_prefetcher: Callable[..., LayerPrefetcher], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    threads: set[threading.Thread] = set()
    real = LayerAssembler.assemble
    monkeypatch.setattr(
        LayerAssembler,
        "assemble",
        lambda self, layer, read: (threads.add(threading.current_thread()), real(self, layer, read))[1],
    )
    prefetcher = open_prefetcher()
    for i in range(LAYERS):
        prefetcher.layer(i)
    assert len(threads) == 1
    assert (threads == {threading.current_thread()}) == (not request.node.callspec.params["open_prefetcher"])


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_layers_are_ready(
    open_prefetcher: Callable[..., LayerPrefetcher], gate: Gate, depth: int
) -> None:
    prefetcher = open_prefetcher(depth=depth)
    for i in range(LAYERS):
        ahead = min(i + depth, LAYERS)
        gate.wait_until(ahead - 1)
        if ahead < LAYERS:
            # The reader cannot begin another one before a layer is taken: it is waiting for room, or about to.
            assert not prefetcher._read[ahead].done()
            assert gate.layers() == list(range(ahead))
        prefetcher.layer(i)


@pytest.mark.parametrize("layer", [0, 5, LAYERS - 1])
def test_a_damaged_layer_loses_the_chunk(
    open_prefetcher: Callable[..., LayerPrefetcher], store: KVStore, plan: BlendPlan, layer: int
) -> None:
    key = plan.segments[1].key
    damage_layer(store, key, layer)
    prefetcher = open_prefetcher()
    for i in range(layer):
        prefetcher.layer(i)
    with pytest.raises(LostChunkError) as caught:
        prefetcher.layer(layer)
    assert (caught.value.gone, caught.value.silent) == ({key}, set())
    prefetcher.close()
    assert store.counts == {"corrupt": 1}
    assert not store.has(key)
    assert store.has(plan.segments[0].key)
    with pytest.raises(LostChunkError):
        open_prefetcher()
    assert store.counts == {"corrupt": 1, "missing": 1}


def test_an_unreadable_layer_loses_the_chunk_but_keeps_the_entry(
    open_prefetcher: Callable[..., LayerPrefetcher], store: KVStore, plan: BlendPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stored: StoredChunk, layer_idx: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(StoredChunk, "layer", fail)
    prefetcher = open_prefetcher()
    with pytest.raises(LostChunkError) as caught:
        prefetcher.layer(0)
    prefetcher.close()
    assert not caught.value.gone and caught.value.silent < plan.keys
    assert store.counts.keys() == {"unavailable"}
    assert all(store.has(key) for key in plan.keys)


@pytest.mark.parametrize("change", [{"num_layers": LAYERS - 1}, {"num_heads": 1}, {"head_dim": 8}])
def test_a_chunk_of_another_geometry_is_lost_not_used(
    open_prefetcher: Callable[..., LayerPrefetcher], store: KVStore, adapter: ModelAdapter, change: dict[str, int]
) -> None:
    right = {"num_layers": LAYERS, "num_heads": adapter.num_kv_heads, "head_dim": adapter.head_dim}
    chunk = random_chunk(9, store.origin(NO_TOKENS, NO_TOKENS), num_tokens=30, **{**right, **change})
    key = store.put(chunk).key
    prefetcher = open_prefetcher(plan=BlendPlan(NUM_TOKENS, (Segment(5, 30, key, 0, False),)))
    with pytest.raises(LostChunkError):
        for i in range(LAYERS):
            prefetcher.layer(i)
    assert store.counts["corrupt"] >= 1


def test_a_missing_chunk_is_lost_at_once_and_nothing_stays_open(
    open_prefetcher: Callable[..., LayerPrefetcher], store: KVStore, plan: BlendPlan
) -> None:
    gone = max(plan.keys)  # entries are opened in the order of their keys
    store.backend.delete(gone)
    with pytest.raises(LostChunkError) as caught:
        open_prefetcher()
    assert (caught.value.gone, caught.value.silent) == ({gone}, set())
    assert open_entries() == 0
    assert reader_threads() == []


def test_an_entry_deleted_meanwhile_is_read_to_its_end(
    open_prefetcher: Callable[..., LayerPrefetcher], store: KVStore, plan: BlendPlan
) -> None:
    prefetcher = open_prefetcher(depth=1)
    prefetcher.layer(0)
    for key in plan.keys:
        store.backend.delete(key)
    for i in range(1, LAYERS):
        prefetcher.layer(i)


@pytest.mark.parametrize("taken", [0, 1, LAYERS])
def test_leaving_stops_the_thread_and_closes_the_entries(
    open_prefetcher: Callable[..., LayerPrefetcher], taken: int
) -> None:
    with pytest.raises(ZeroDivisionError), open_prefetcher(depth=2) as prefetcher:
        assert open_entries() == 2
        for i in range(taken):
            prefetcher.layer(i)
        assert len(reader_threads()) == 1 or taken == LAYERS
        _ = 1 / 0
    assert reader_threads() == []
    assert open_entries() == 0
    prefetcher.close()


def test_closing_while_the_reader_waits_for_room_wakes_it(
    open_prefetcher: Callable[..., LayerPrefetcher], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    real = threading.Semaphore.acquire

    def acquire(semaphore: threading.Semaphore, *args: object, **kwargs: object) -> bool:
        if threading.current_thread().name.startswith(THREAD) and semaphore._value == 0:
            waiting.set()
        return real(semaphore, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(threading.Semaphore, "acquire", acquire)
    prefetcher = open_prefetcher(depth=2)
    assert waiting.wait(20)
    closer = threading.Thread(target=prefetcher.close, daemon=True)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    assert gate.layers() == [0, 1]
    assert reader_threads() == []


def test_closing_while_a_layer_is_being_read_waits_for_that_one_only(
    open_prefetcher: Callable[..., LayerPrefetcher], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = LayerAssembler.assemble
    monkeypatch.setattr(
        LayerAssembler, "assemble", lambda self, layer, read: (written.append(layer), real(self, layer, read))[1]
    )
    gate.open.clear()
    prefetcher = open_prefetcher()
    gate.wait_until(0)
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    assert prefetcher._stopped.wait(20)
    gate.open.set()
    closer.join(20)
    assert not closer.is_alive()
    assert gate.layers() == [0]
    assert reader_threads() == []
    assert written == []  # somebody else may have the space by now
    assert open_entries() == 0


def test_a_caller_that_waits_for_a_layer_is_woken_by_close(
    open_prefetcher: Callable[..., LayerPrefetcher], gate: Gate
) -> None:
    prefetcher = open_prefetcher(depth=1)
    gate.wait_until(0)
    results: list[BaseException] = []

    def wait() -> None:
        try:
            prefetcher.layer(LAYERS - 1)
        except (CancelledError, RuntimeError) as error:
            results.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    prefetcher.close()
    waiter.join(20)
    assert not waiter.is_alive()
    assert len(results) == 1
