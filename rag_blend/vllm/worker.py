"""vLLM's worker for this platform, with one addition: the connector meets the model. For `--worker-cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from rag_blend.vllm.checkpoint import geometry_of
from rag_blend.vllm.connector import BlendConnector
from rag_blend.vllm.support import refuse_unsupported

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class BlendWorker(Worker):
    """A connector cannot reach the model by any of its own hooks."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, unless it is known already that it cannot be blended.

        Raises:
            UnsupportedModelError: Model or options cannot be blended; the text names what.
        """
        refuse_unsupported(self.vllm_config)
        model = self.vllm_config.model_config
        geometry_of(model.model, model.dtype, model.revision)
        super().load_model(load_dummy_weights=load_dummy_weights)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Set up the cache and the connector.

        Raises:
            ValueError: The connector is another one.
        """
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group()
        if not isinstance(connector, BlendConnector):
            raise ValueError(f"BlendWorker serves BlendConnector, not {type(connector).__name__}")
        connector.serve(self.model_runner)

    def forget_rows(self) -> None:
        """See `BlendConnector.forget_rows`; called by `collective_rpc`."""
        get_kv_transfer_group().forget_rows()

    def prefill_rows(self, token_ids: list[int], start: int) -> tuple[int, bytes]:
        """See `BlendConnector.prefill_rows`; called by `collective_rpc`."""
        rows: tuple[int, bytes] = get_kv_transfer_group().prefill_rows(token_ids, start)
        return rows
