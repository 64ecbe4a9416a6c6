"""The KV connector that vLLM loads by `kv_connector_module_path`: it hands what it is called with to its halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig

from rag_blend.storage import open_storage
from rag_blend.vllm.blender import Blender
from rag_blend.vllm.checkpoint import geometry_of, read_checkpoint
from rag_blend.vllm.messages import BlendMetadata, BlendReport, LostChunks
from rag_blend.vllm.options import Options
from rag_blend.vllm.paged import PagedModel
from rag_blend.vllm.planner import PromptPlanner
from rag_blend.vllm.scheduler import BlendScheduler
from rag_blend.vllm.scratch import ScratchPrefill
from rag_blend.vllm.support import refuse_unsupported, refuse_unsupported_cache, require_worker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class BlendConnector(KVConnectorBase_V1):
    """Prompts begin with blocks that were blended from stored chunks; vLLM computes the rest.

    Blending is an asynchronous load for vLLM: a request waits, with its blocks, while others go on; blocks are known
    to the prefix cache only when they are filled; and whatever an earlier step computes is there when a blend begins.

    Raises:
        UnsupportedModelError: Model or options cannot be blended; the text names what.
        ValueError: An option must be set otherwise.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config)
        refuse_unsupported_cache(kv_cache_config)
        require_worker(vllm_config)
        self._options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._kv_dtype = self._options.stored_dtype(vllm_config.model_config.dtype)
        self._scheduler = self._make_scheduler() if role is KVConnectorRole.SCHEDULER else None
        self._num_blocks = kv_cache_config.num_blocks
        self._blender: Blender | None = None
        self._scratch: ScratchPrefill | None = None
        self._lost: dict[str, LostChunks] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed on."""
        return False

    # The workers' half.

    def serve(self, runner: Any) -> None:
        """Meet the model; see `BlendWorker`."""
        model, config = self._vllm_config.model_config, self._vllm_config
        geometry = geometry_of(model.model, model.dtype, model.revision)
        paged, most = PagedModel(runner, config, geometry), config.scheduler_config.max_num_batched_tokens
        backend, max_rows = open_storage(self._options.storage), min(self._options.max_rows or most, most)
        self._blender = Blender(paged, geometry, backend, self._kv_dtype, max_rows)
        self._scratch = ScratchPrefill(paged, self._num_blocks, model.max_model_len, most)
        self._heads = paged.heads

    def forget_rows(self) -> None:
        """What `prefill_rows` has computed may be gone from vLLM's cache."""
        assert self._scratch is not None
        self._scratch.forget()

    def prefill_rows(self, token_ids: list[int], start: int) -> tuple[int, bytes]:
        """Rows of a sequence that is no request; see `ScratchPrefill.rows`.

        Returns:
            The first of this rank's KV heads, and the rows.

        Raises:
            ValueError: The cache has no room for it.
        """
        assert self._scratch is not None
        return self._heads.start, self._scratch.rows(np.asarray(token_ids, dtype=np.int32), start)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Blend; vLLM calls this behind the step's own forward."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata) and self._blender is not None and self._scratch is not None
        self._scratch.forget()  # this step's requests may have its blocks
        self._blender.add(metadata.jobs, metadata.fingerprint)
        self._blender.step()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `Blender.before_attention`; of forwards that are not the blender's nothing is wanted."""
        if self._blender is not None:
            self._blender.before_attention(extract_layer_index(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved of requests; chunks are ingested by `prefill_rows`, or elsewhere."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' blocks are filled, and which hold nothing because a chunk could not be read."""
        assert self._blender is not None
        self._lost = self._blender.take_lost()
        finished = self._blender.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=set(self._lost))

    def build_connector_worker_meta(self) -> BlendReport | None:
        """Which chunks could not be read."""
        return BlendReport(self._lost) if self._lost else None

    # The scheduler's half.

    def on_new_request(self, request: Request) -> None:
        """See `BlendScheduler.arrived`."""
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `BlendScheduler.num_blendable`."""
        assert self._scheduler is not None
        number = self._scheduler.num_blendable(request, num_computed_tokens)
        return number, bool(number)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `BlendScheduler.allocated`."""
        assert self._scheduler is not None
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `BlendScheduler.take_metadata`."""
        assert self._scheduler is not None
        return self._scheduler.take_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `BlendScheduler.lost`."""
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, BlendReport):
            self._scheduler.lost(report.lost)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `BlendScheduler.finished`."""
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    def shutdown(self) -> None:
        """Release threads and the store."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._blender is not None:
            self._blender.close()

    def _make_scheduler(self) -> BlendScheduler:
        config = self._vllm_config
        model = config.model_config
        fingerprint, tokenizer = read_checkpoint(model.model, model.dtype, self._kv_dtype, model.revision)
        backend = open_storage(self._options.storage)
        planner = PromptPlanner(backend, fingerprint, self._kv_dtype, tokenizer, self._options)
        return BlendScheduler(planner, fingerprint, config.parallel_config.tensor_parallel_size)
