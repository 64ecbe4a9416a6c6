"""What the scheduler's half of the connector and the workers' half tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from rag_blend.plan import BlendPlan, Positions


@dataclass(frozen=True, slots=True, eq=False)
class BlendJob:
    """One prompt's beginning, to be put into vLLM's cache.

    Attributes:
        request_id: Whose prompt it is.
        namespace: Tenant.
        token_ids: The beginning, int32, shape (num_tokens,).
        layout: What stored chunks cover of it.
        rows: Positions to compute, ascending.
        selector: Name of the selector that chose them; it may drop some at its check layer.
        num_kept: How many of the covered rows stay then; None if it has none.
        start: What is in front of this position is in vLLM's cache and shared with others: it is not written to.
        block_ids: vLLM's blocks of the prompt.
    """

    request_id: str
    namespace: str
    token_ids: np.ndarray
    layout: BlendPlan
    rows: Positions
    selector: str
    num_kept: int | None
    start: int
    block_ids: list[int]


@dataclass(slots=True)
class BlendMetadata(KVConnectorMetadata):
    """New jobs of one step, for every worker.

    Attributes:
        fingerprint: Digest of the model's `ModelFingerprint`, which only the scheduler's side computes.
        jobs: In the order in which they are to be done.
    """

    fingerprint: str
    jobs: list[BlendJob]


@dataclass(frozen=True, slots=True)
class LostChunks:
    """Keys of chunks that could not be read: `gone` for good, or `silent`, their medium does not answer."""

    gone: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()

    def __or__(self, other: LostChunks) -> LostChunks:
        return LostChunks(self.gone | other.gone, self.silent | other.silent)


@dataclass(slots=True)
class BlendReport(KVConnectorWorkerMetadata):
    """What went wrong in one step.

    Attributes:
        lost: By request id; such a request is to be looked up again without these chunks.
    """

    lost: dict[str, LostChunks] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BlendReport:
        """Both ranks' reports as one."""
        assert isinstance(other, BlendReport)
        ids = self.lost.keys() | other.lost.keys()
        return BlendReport({i: self.lost.get(i, LostChunks()) | other.lost.get(i, LostChunks()) for i in ids})
