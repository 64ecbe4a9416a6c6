"""The model inside vLLM: rows written to its paged cache, and forwards over some rows of one prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from rag_blend.chunk import LayerKV
from rag_blend.errors import UnsupportedModelError
from rag_blend.models import ModelAdapter
from rag_blend.plan import Positions
from rag_blend.vllm.virtual import VirtualRequests


class PagedModel:
    """One rank's share of the model.

    Args:
        runner: vLLM's model runner, its cache in place.
        config: vLLM's configuration.
        geometry: The model as transformers knows it.

    Raises:
        UnsupportedModelError: vLLM computes keys otherwise than transformers.
    """

    def __init__(self, runner: Any, config: VllmConfig, geometry: ModelAdapter) -> None:
        self._model = runner.get_model()
        self._config = config
        self._device = runner.device
        self._groups = [_own_builders(group, config, self._device) for group in runner.attn_groups[0]]
        layers = config.compilation_config.static_forward_context
        names = [name for group in self._groups for name in group.layer_names]
        self._layers = {extract_layer_index(name): layers[name] for name in names}
        if sorted(self._layers) != list(range(geometry.num_layers)):
            raise UnsupportedModelError("vLLM's layers are not those of the transformers model.", servable=False)
        self._block_size = self._groups[0].get_metadata_builder().kv_cache_spec.block_size
        self._blocks_per_page = self._groups[0].kv_cache_spec.block_size // self._block_size
        self._heads = _heads_of_rank(geometry.num_kv_heads, self._layers[0].num_kv_heads)
        _require_same_rotation(self._model, geometry)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @property
    def tokens_per_block(self) -> int:
        """How many tokens one of vLLM's blocks holds."""
        size: int = self._block_size * self._blocks_per_page
        return size

    @property
    def heads(self) -> slice:
        """Which of the model's KV heads this rank has."""
        return self._heads

    def write(self, layer_idx: int, rows: LayerKV, block_ids: Sequence[int], positions: torch.Tensor) -> None:
        """Write rows of a prompt to a layer's cache.

        Args:
            layer_idx: The layer.
            rows: Keys after RoPE and values of all heads, (num_kv_heads, num_rows, head_dim) each.
            block_ids: vLLM's blocks of the prompt.
            positions: Of the rows, int64, shape (num_rows,).
        """
        keys, values = (side[self._heads].transpose(0, 1).contiguous().to(self._device) for side in rows)
        self._write(layer_idx, keys, values, self._slots(block_ids, positions))

    def forward(self, token_ids: np.ndarray, block_ids: Sequence[int], positions: Positions) -> None:
        """Run the whole model over some rows of a prompt; their keys and values are then in the cache.

        Args:
            token_ids: Of the prompt, int32, shape (num_tokens,).
            block_ids: vLLM's blocks of the prompt.
            positions: The rows, ascending.
        """
        requests = VirtualRequests.of(positions)
        self._run(token_ids, block_ids, requests)

    def forward_and_keep(self, token_ids: np.ndarray, block_ids: Sequence[int], positions: Positions) -> list[LayerKV]:
        """Like `forward`.

        Returns:
            The rows' keys (after RoPE) and values of all layers, (this rank's heads, num_rows, head_dim) each.
        """
        requests = VirtualRequests.of(positions)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def keep(layer_idx: int, _: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            kept[layer_idx] = arguments[1], arguments[2]

        with contextlib.ExitStack() as hooks:
            for layer_idx, layer in self._layers.items():
                handle = layer.register_forward_pre_hook(partial(keep, layer_idx))
                hooks.callback(handle.remove)
            self._run(token_ids, block_ids, requests)
        ascending = torch.argsort(torch.from_numpy(requests.positions)).to(self._device)
        return [self._in_heads(layer_idx, *kept[layer_idx], ascending) for layer_idx in range(self.num_layers)]

    def forward_to(
        self, layer_idx: int, token_ids: np.ndarray, block_ids: Sequence[int], positions: Positions
    ) -> LayerKV:
        """Like `forward`, but ends before a layer's attention; its rows are in the cache, too.

        Returns:
            The rows' keys (after RoPE) and values of that layer, (num_kv_heads, num_rows, head_dim) each.
        """
        requests = VirtualRequests.of(positions)
        layer = self._layers[layer_idx]
        try:
            handle = layer.register_forward_pre_hook(_intercept)
            try:
                self._run(token_ids, block_ids, requests)
            finally:
                handle.remove()
        except _InterceptedError as intercepted:
            shape = (-1, layer.num_kv_heads, layer.head_size)
            keys, values = (side.view(shape) for side in (intercepted.keys, intercepted.values))
        else:
            raise RuntimeError(f"layer {layer_idx} was not called")
        run_order = torch.from_numpy(requests.positions)
        self._write(layer_idx, keys, values, self._slots(block_ids, run_order))
        return self._in_heads(layer_idx, keys, values, torch.argsort(run_order).to(self._device))

    def _in_heads(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor) -> LayerKV:
        """An attention layer's arguments, their rows in an order, (this rank's heads, num_rows, head_dim) each."""
        layer = self._layers[layer_idx]
        shape = (-1, layer.num_kv_heads, layer.head_size)
        return LayerKV(*(side.view(shape)[order].transpose(0, 1) for side in (keys, values)))

    def _run(self, token_ids: np.ndarray, block_ids: Sequence[int], requests: VirtualRequests) -> None:
        positions = torch.from_numpy(requests.positions)
        slots = self._slots(block_ids, positions)
        metadata, slot_mapping = {}, {}
        common = self._common(block_ids, requests, positions.to(self._device), slots)
        for group in self._groups:
            built = group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
            slot_mapping.update(dict.fromkeys(group.layer_names, slots))
        ids = torch.from_numpy(token_ids[requests.positions].astype(np.int32)).to(self._device)
        with self._context(metadata, len(positions), slot_mapping):
            self._model(input_ids=ids, positions=positions.to(self._device))

    def _context(
        self, metadata: dict[str, Any], num_tokens: int, slots: dict[str, torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Eager: what vLLM has compiled or captured was made for batches of its own."""
        context: contextlib.AbstractContextManager[None] = set_forward_context(
            metadata, self._config, num_tokens=num_tokens, slot_mapping=slots, skip_compiled=True
        )
        return context

    def _common(
        self, block_ids: Sequence[int], requests: VirtualRequests, positions: torch.Tensor, slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        starts, lengths = torch.from_numpy(requests.query_starts), torch.from_numpy(requests.seq_lens)
        first = torch.tensor(block_ids, dtype=torch.int32)[:, None] * self._blocks_per_page
        table = (first + torch.arange(self._blocks_per_page, dtype=torch.int32)).flatten().to(self._device)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self._device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(requests),
            num_actual_tokens=len(positions),
            max_query_len=int(np.diff(requests.query_starts).max()),
            max_seq_len=int(requests.seq_lens.max()),
            block_table_tensor=table.repeat(len(requests), 1),
            slot_mapping=slots,
            positions=positions,
            is_prefilling=torch.ones(len(requests), dtype=torch.bool),
        )

    def _slots(self, block_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        size = self.tokens_per_block
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        slots = blocks[positions // size] * size + positions % size
        on_device: torch.Tensor = slots.to(self._device)
        return on_device

    def _write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """By the backend's own method, which alone knows how its blocks are laid out."""
        layer = self._layers[layer_idx]
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


class _InterceptedError(Exception):
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


def _intercept(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    keys, values = arguments[1:3]
    raise _InterceptedError(keys, values)


def _own_builders(group: AttentionGroup, config: VllmConfig, device: torch.device) -> AttentionGroup:
    """The group with a metadata builder of its own: the runner's may keep buffers for the batch under way."""
    own = AttentionGroup(group.backend, group.layer_names, group.kv_cache_spec, group.kv_cache_group_id)
    own.create_metadata_builders(config, device, group.get_metadata_builder().kv_cache_spec.block_size)
    return own


def _heads_of_rank(num_kv_heads: int, local: int) -> slice:
    """Which of the model's KV heads this rank has; where there are fewer heads than ranks, several have the same."""
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if local != max(1, num_kv_heads // world):
        raise UnsupportedModelError(f"{local} of {num_kv_heads} KV heads on one of {world} ranks.", servable=False)
    first = rank * num_kv_heads // world
    return slice(first, first + local)


def _require_same_rotation(model: torch.nn.Module, geometry: ModelAdapter) -> None:
    """Stored keys are rotated by transformers' module, fresh ones by vLLM's: both must do the same."""
    rotaries: list[Any] = [module for module in model.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not rotaries:
        raise UnsupportedModelError("vLLM has no rotary embedding for this model.", servable=False)
    last = geometry.config.max_position_embeddings - 1
    positions = torch.tensor([0, 1, 2, last // 3, last])
    angles = geometry.rotary.angles(last + 1, torch.device("cpu"))
    keys = torch.randn(len(positions), geometry.head_dim, generator=torch.Generator().manual_seed(0))
    expected = geometry.rotary.rotate(keys[None, None], type(angles)(*(side[positions] for side in angles)))[0, 0]
    for rotary in rotaries:
        device = rotary.cos_sin_cache.device
        rotated, _ = rotary.forward_native(positions.to(device), keys.to(device, geometry.dtype))
        # Angles are rounded to the dtype in vLLM and not here: an error of about one unit in the last place each.
        if not torch.allclose(rotated.cpu().float(), expected, atol=16 * torch.finfo(geometry.dtype).eps, rtol=0.02):
            raise UnsupportedModelError("vLLM rotates keys otherwise than transformers does.", servable=False)
