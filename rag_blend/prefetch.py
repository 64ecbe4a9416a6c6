"""Layers that come are read and checked, and where cores allow put at their positions, while the model computes one."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import numpy as np

from rag_blend.assembly import Assembled, LayerAssembler, is_better_beside
from rag_blend.chunk import LayerKV
from rag_blend.errors import CorruptChunkError, StoreError, StoreUnavailableError
from rag_blend.models import ModelAdapter
from rag_blend.patience import HangingStoreError, fulfil
from rag_blend.plan import BlendPlan
from rag_blend.rope import Angles
from rag_blend.space import Space
from rag_blend.store import KVStore, StoredChunk

T = TypeVar("T")


class LostChunkError(Exception):
    """Chunks turned out to be unusable while the prompt was being blended: do it again without them.

    Attributes:
        gone: Keys of those that are missing or damaged.
        silent: Keys of those whose medium does not answer: another prompt may try again.
    """

    def __init__(self, gone: Collection[str] = (), silent: Collection[str] = ()) -> None:
        super().__init__(*gone, *silent)
        self.gone = frozenset(gone)
        self.silent = frozenset(silent)


class LayerPrefetcher:
    """Reads the reused rows of a plan, layer by layer, in threads of its own.

    A context manager: leaving it stops the threads and closes the entries.

    Args:
        plan: What to read.
        store: Where from.
        adapter: The model they are for.
        angles: Of all positions of the prompt.
        space: Where the prompt's rows are to lie.
        depth: How many layers may be ready before they are used; bounds memory, not speed.
        kept: Rows of the plan's `kept` tokens, keys after RoPE, (num_kv_heads, num_tokens, head_dim) for each layer.

    Raises:
        LostChunkError: A chunk of the plan cannot be opened.
    """

    def __init__(
        self,
        plan: BlendPlan,
        store: KVStore,
        adapter: ModelAdapter,
        angles: Angles,
        space: Space,
        depth: int = 4,
        kept: Sequence[LayerKV] = (),
    ) -> None:
        self._plan = plan
        self._store = store
        self._patience = store.patience
        self._adapter = adapter
        self._assembler = LayerAssembler(plan, adapter, angles, space, kept)
        self._slots = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._assembling = threading.Lock()  # once the prefetcher is closed, nobody writes to the space
        self._read_s = 0.0
        self.waited_s = 0.0  # time for which somebody waited for a layer
        self._reading_s: defaultdict[str, float] = defaultdict(float)  # by key; threads at once may add up to more
        # Media far away are asked for all chunks at once; a disk is not faster for it.
        at_once = store.backend.parallel_reads
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="rag-blend-fetch") if at_once > 1 else None
        self._map = map if self._pool is None else self._pool.map
        start = time.perf_counter()
        self._chunks = self._open_all()
        self._opened_s = time.perf_counter() - start
        self._read: list[Future[Mapping[str, LayerKV]]] = [Future() for _ in range(adapter.num_layers)]
        self._assembled: list[Future[Assembled]] = [Future() for _ in range(adapter.num_layers)]
        self._news = 0  # grows as long as the store answers
        self._end: Future[None] = Future()
        self._beside = is_better_beside(adapter.device)
        # The next layer is on its way while one is put at its positions. And daemons, for they may be left behind: no
        # process shall wait for a store that hangs in order to end.
        works = {"reader": self._read_all, **({"assembler": self._assemble_all} if self._beside else {})}
        self._threads = [
            threading.Thread(target=work, name=f"rag-blend-{name}", daemon=True) for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def layer(self, layer_idx: int) -> LayerKV:
        """Wait for a layer; each may be taken once.

        Returns:
            Keys (after RoPE) and values, (1, num_kv_heads, num_tokens + room, head_dim) each, in the model's dtype
            and the caller's to write to. Rows that no segment covers are uninitialised.

        Raises:
            LostChunkError: A chunk is damaged or gone, or the store hangs.
        """
        if self._beside:
            kv, take_over = self._await(self._assembled[layer_idx])
        else:
            kv, take_over = self._assemble(layer_idx, self._await(self._read[layer_idx]))
        self._slots.release()
        take_over()
        return kv

    def fetches(self, places: Mapping[str, str]) -> Iterator[tuple[str, int, int, float]]:
        """When all layers have been taken: from which place came how many entries and tokens, in how many seconds.

        Args:
            places: Where the chunks come from, by their keys.
        """
        tokens: defaultdict[str, int] = defaultdict(int)
        reading_s: defaultdict[str, float] = defaultdict(float)
        entries = Counter(places[key] for key in self._plan.keys)
        for segment in self._plan.segments:
            tokens[places[segment.key]] += len(segment)
        for key, seconds in self._reading_s.items():
            reading_s[places[key]] += seconds
        whole_s = (self._opened_s + self._read_s) / (sum(reading_s.values()) or 1.0)
        return ((place, entries[place], count, whole_s * reading_s[place]) for place, count in tokens.items())

    @property
    def load_s(self) -> float:
        """Seconds spent reading rows and putting them at their positions, in whatever thread."""
        return self._read_s + self._assembler.seconds

    def staleness(self) -> np.ndarray:
        """How much each prompt token's stored rows depend on what was in front of them, float32, shape (num_tokens,).

        See `ChunkKV.staleness`; 1 where it is unknown.
        """
        known = np.ones(self._plan.num_tokens, dtype=np.float32)
        for segment in self._plan.segments:
            stored = self._chunks[segment.key].header.staleness
            if stored is not None:
                known[segment.start : segment.end] = stored[segment.offset : segment.offset + len(segment)]
        return known

    def _open_all(self) -> Mapping[str, StoredChunk]:
        keys = sorted(self._plan.keys)
        opened = dict(zip(keys, self._map(self._open, keys), strict=True))
        chunks = {key: chunk for key, chunk in opened.items() if isinstance(chunk, StoredChunk)}
        if len(chunks) == len(keys):
            return chunks
        for chunk in chunks.values():
            chunk.close()
        if self._pool is not None:
            self._pool.shutdown()
        silent = [key for key, error in opened.items() if isinstance(error, StoreUnavailableError)]
        raise LostChunkError(set(keys) - chunks.keys() - set(silent), silent)

    def _open(self, key: str) -> StoredChunk | StoreError:
        start = time.perf_counter()
        try:
            return self._store.open(key)
        except StoreError as error:
            return error
        finally:
            self._reading_s[key] += time.perf_counter() - start

    def _read_all(self) -> None:
        for layer_idx, future in enumerate(self._read):
            fulfil(future, partial(self._read_layer, layer_idx))
        if not self._beside:
            self._end.set_result(None)

    def _read_layer(self, layer_idx: int) -> Mapping[str, LayerKV]:
        if not self._stopped.is_set():
            self._slots.acquire()
        self._require_open()
        self._news += 1
        start = time.perf_counter()
        layers = self._map(lambda chunk: self._read_chunk(chunk, layer_idx), self._chunks.values())
        read = dict(zip(self._chunks, layers, strict=True))
        self._read_s += time.perf_counter() - start
        return read

    def _assemble_all(self) -> None:
        for layer_idx, future in enumerate(self._assembled):
            if future.set_running_or_notify_cancel():
                fulfil(future, partial(self._assemble_when_read, layer_idx))
        self._threads[0].join()  # it may still hang in a layer that nobody wants any more
        self._end.set_result(None)

    def _assemble_when_read(self, layer_idx: int) -> Assembled:
        return self._assemble(layer_idx, self._read[layer_idx].result())

    def _assemble(self, layer_idx: int, read: Mapping[str, LayerKV]) -> Assembled:
        self._read[layer_idx] = Future()  # its rows are not needed any more
        with self._assembling:
            self._require_open()
            return self._assembler.assemble(layer_idx, read)

    def _await(self, future: Future[T]) -> T:
        start = time.perf_counter()
        try:
            return self._patience.wait(future, lambda: self._news)
        except HangingStoreError as error:
            self._patience.give_up(self._end)
            for key in self._plan.keys:
                self._store.count_unavailable(key, error)
            raise LostChunkError(silent=self._plan.keys) from error
        finally:
            self.waited_s += time.perf_counter() - start

    def _read_chunk(self, chunk: StoredChunk, layer_idx: int) -> LayerKV:
        start = time.perf_counter()
        try:
            kv = chunk.layer(layer_idx)
            self._reading_s[chunk.key] += time.perf_counter() - start
            heads, _, head_dim = kv.keys.shape
            if (heads, head_dim) != (self._adapter.num_kv_heads, self._adapter.head_dim):
                raise CorruptChunkError(f"{heads} heads of size {head_dim} are not what the model has")
        except CorruptChunkError as error:
            self._store.discard_damaged(chunk.key, error)
            raise LostChunkError(gone=[chunk.key]) from error
        except OSError as error:
            self._store.count_unavailable(chunk.key, error)
            raise LostChunkError(silent=[chunk.key]) from error
        self._news += 1
        with self._assembler.lane.working():  # also in a thread of the pool
            return LayerKV(*map(self._assembler.lane.bring, kv))

    def close(self) -> None:
        """Stop reading and release the entries; if the store hangs, as soon as it answers."""
        with self._assembling:
            self._stopped.set()
        for future in self._assembled:
            future.cancel()
        self._slots.release()  # wakes the reader if it waits for room; it then sees that it shall stop
        try:
            self._patience.wait(self._end, lambda: self._news)
        except HangingStoreError:
            self._patience.give_up(self._end, self._release)
        else:
            for thread in self._threads:
                thread.join()
            self._release()

    def _require_open(self) -> None:
        if self._stopped.is_set():
            raise RuntimeError("the prefetcher was closed")

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for chunk in self._chunks.values():
            chunk.close()

    def __enter__(self) -> LayerPrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
