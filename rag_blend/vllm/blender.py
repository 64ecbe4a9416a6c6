"""One worker's part: prompts are put together in vLLM's cache, some rows from the store, the others computed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.plan import Positions
from rag_blend.selectors import selector_of
from rag_blend.storage import StorageBackend
from rag_blend.store import KVStore
from rag_blend.vllm.messages import BlendJob, LostChunks
from rag_blend.vllm.paged import PagedModel
from rag_blend.vllm.stored_rows import StoredRows


class Blender:
    """Does jobs in their order, in bursts of some rows, so that other requests' tokens come between them.

    With several ranks all must run the same forwards, since those wait for each other. So a rank that cannot read a
    chunk goes on as if nothing were wrong, and says so in the end.

    Args:
        model: The model inside vLLM.
        geometry: The same as transformers knows it.
        backend: Where chunks are.
        kv_dtype: Dtype of stored keys and values.
        max_rows: Rows of a burst, and of all bursts of one `step`.
    """

    def __init__(
        self, model: PagedModel, geometry: ModelAdapter, backend: StorageBackend, kv_dtype: torch.dtype, max_rows: int
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._backend = backend
        self._kv_dtype = kv_dtype
        self._max_rows = max_rows
        self._stores: dict[tuple[str, str], KVStore] = {}
        self._jobs: deque[tuple[BlendJob, KVStore]] = deque()
        self._bursts: Generator[int] | None = None  # of the job under way
        self._due: int | None = None  # rows of its next burst
        self._loading: StoredRows | None = None
        self._finished: set[str] = set()
        self._lost: dict[str, LostChunks] = {}

    def add(self, jobs: Iterable[BlendJob], fingerprint: str) -> None:
        """Take on jobs; `step` does them."""
        self._jobs.extend((job, self._store(fingerprint, job.namespace)) for job in jobs)

    def step(self) -> None:
        """Compute as many bursts as one step may have, at least one if there is any."""
        computed = 0
        while (due := self._next_burst()) is not None:
            if computed and computed + due > self._max_rows:
                return
            computed += due
            assert self._bursts is not None
            self._due = next(self._bursts, None)

    def before_attention(self, layer_idx: int) -> None:
        """A forward has written a layer's fresh rows and is about to attend: the stored ones must be there, too."""
        if self._loading is not None:
            self._loading.place_up_to(layer_idx)

    def take_finished(self) -> set[str]:
        """Ids of the requests whose jobs have been done since the last call, those with lost chunks among them."""
        finished, self._finished = self._finished, set()
        return finished

    def take_lost(self) -> dict[str, LostChunks]:
        """What could not be read for requests that have finished since the last call: their blocks hold nothing."""
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """Give up what is under way and release the store."""
        self._jobs.clear()
        if self._bursts is not None:
            self._bursts.close()
        self._backend.close()

    def _next_burst(self) -> int | None:
        """Rows of the next burst, of the job under way or of the next one; None when there is nothing to do."""
        while self._due is None and self._jobs:
            self._bursts = self._blend(*self._jobs.popleft())
            self._due = next(self._bursts, None)
        return self._due

    def _blend(self, job: BlendJob, store: KVStore) -> Generator[int]:
        """Do a job; before each burst its number of rows is yielded."""
        rows = job.rows[job.rows >= job.start]
        with StoredRows(job, store, self._geometry, self._model) as stored:
            if job.num_kept is not None:
                rows = yield from self._check(job, rows, stored)
                stored.leave_out(rows)
            for part in self._parts(rows):
                yield len(part)
                with self._placing(stored):
                    self._model.forward(job.token_ids, job.block_ids, part)
            stored.place_up_to(self._model.num_layers - 1)
            if stored.lost is not None:
                self._lost[job.request_id] = stored.lost
        self._finished.add(job.request_id)

    def _check(self, job: BlendJob, rows: Positions, stored: StoredRows) -> Generator[int, None, Positions]:
        """Compute all rows up to the selector's check layer; returns those that it keeps."""
        selector = selector_of(job.selector)
        assert selector.check_layer is not None and job.num_kept is not None
        fresh = []
        for part in self._parts(rows):
            yield len(part)
            with self._placing(stored):
                fresh.append(self._model.forward_to(selector.check_layer, job.token_ids, job.block_ids, part))
        stored.place_up_to(selector.check_layer)
        covered = np.isin(rows, job.layout.reusable)
        if stored.lost is not None or not covered.any():
            return rows[~covered]
        candidates = rows[covered]
        computed = LayerKV(*(torch.cat(sides, dim=1).cpu()[:, covered] for sides in zip(*fresh, strict=True)))
        kept = selector.refine(computed, stored.at(candidates), min(job.num_kept, len(candidates)))
        return np.sort(np.concatenate([rows[~covered], candidates[kept.numpy()]]))

    def _parts(self, rows: Positions) -> Iterator[Positions]:
        """Bursts; in the order of positions, since a row needs those in front of it."""
        for start in range(0, len(rows), self._max_rows):
            yield rows[start : start + self._max_rows]

    @contextlib.contextmanager
    def _placing(self, stored: StoredRows) -> Iterator[None]:
        """Within it, forwards find the stored rows."""
        self._loading = stored
        try:
            yield
        finally:
            self._loading = None

    def _store(self, fingerprint: str, namespace: str) -> KVStore:
        at = (fingerprint, namespace)
        if at not in self._stores:
            self._stores[at] = KVStore(self._backend, fingerprint, namespace, self._kv_dtype)
        return self._stores[at]
