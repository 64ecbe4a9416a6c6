"""The stored rows of one prompt on their way into vLLM's cache, layer by layer."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan, Positions, positions_of
from rag_blend.prefetch import LayerPrefetcher, LostChunkError
from rag_blend.space import OwnSpace
from rag_blend.store import KVStore
from rag_blend.vllm.messages import BlendJob, LostChunks
from rag_blend.vllm.paged import PagedModel


class StoredRows:
    """Reads layers ahead, in a thread of its own, and writes each when it is needed. A context manager.

    Only rows that are not computed are written, since they come after the layer's fresh ones.

    Args:
        job: The prompt.
        store: Where its chunks are.
        geometry: The model as transformers knows it.
        model: The model inside vLLM.

    Attributes:
        lost: What could not be read; from then on nothing is written. None: nothing is missing so far.
    """

    def __init__(self, job: BlendJob, store: KVStore, geometry: ModelAdapter, model: PagedModel) -> None:
        self.lost: LostChunks | None = None
        self._job = job
        self._model = model
        self._segments = tuple(s for s in job.layout.segments if s.end > job.start)
        self._source = self._open(store, geometry)
        self._next = 0
        self._latest: LayerKV | None = None
        self.leave_out(job.rows)

    def leave_out(self, computed: Positions) -> None:
        """From the next layer on, these rows are computed and all others that are stored are written."""
        stored = positions_of(self._segments)
        stored = np.setdiff1d(stored[stored >= self._job.start], computed)
        self._positions = torch.from_numpy(stored)

    def place_up_to(self, layer_idx: int) -> None:
        """Wait for the layers that are missing up to this one, and write them."""
        while self._next <= layer_idx and self.lost is None:
            try:
                self._place(self._next)
            except LostChunkError as error:
                self.lost = LostChunks(error.gone, error.silent)
            self._next += 1

    def at(self, positions: Positions) -> LayerKV:
        """Stored rows of the layer that was written last, (num_kv_heads, num_rows, head_dim); None was lost so far."""
        assert self._latest is not None
        return LayerKV(*(side[:, torch.from_numpy(positions)] for side in self._latest))

    def _open(self, store: KVStore, geometry: ModelAdapter) -> LayerPrefetcher | None:
        plan = BlendPlan(self._job.layout.num_tokens, self._segments)
        try:
            with torch.inference_mode(False):  # vLLM's; what is made in it, a reader thread may not write to
                angles = geometry.rotary.angles(plan.num_tokens, geometry.device)
                return LayerPrefetcher(plan, store, geometry, angles, OwnSpace())
        except LostChunkError as error:
            self.lost = LostChunks(error.gone, error.silent)
            return None

    def _place(self, layer_idx: int) -> None:
        assert self._source is not None  # or it was lost
        self._latest = LayerKV(*(side[0] for side in self._source.layer(layer_idx)))
        if len(self._positions):
            rows = LayerKV(*(side[:, self._positions] for side in self._latest))
            self._model.write(layer_idx, rows, self._job.block_ids, self._positions)

    def __enter__(self) -> StoredRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._source is not None:
            self._source.close()
