"""Put a layer's stored rows at their positions in a prompt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan
from rag_blend.rope import Angles
from rag_blend.space import Space
from rag_blend.streams import CopyLane

Assembled = tuple[LayerKV, Callable[[], None]]  # and what the model's thread calls before it uses the rows


class LayerAssembler:
    """Assembles one prompt's layers, one at a time.

    Args:
        plan: What stands where.
        adapter: The model they are for.
        angles: Of all positions of the prompt.
        space: Where its rows are to lie.
        kept: Rows of the plan's `kept` tokens, keys after RoPE, (num_kv_heads, num_tokens, head_dim) for each layer.

    Attributes:
        lane: Where its work on a device goes.
        seconds: Spent so far.
    """

    def __init__(
        self, plan: BlendPlan, adapter: ModelAdapter, angles: Angles, space: Space, kept: Sequence[LayerKV] = ()
    ) -> None:
        self.lane = CopyLane(adapter.device)
        self.seconds = 0.0
        self._plan = plan
        self._adapter = adapter
        self._angles = angles
        self._kept = kept
        self._space = space
        shape = (1, adapter.num_kv_heads, plan.num_tokens, adapter.head_dim)
        side = torch.empty((), dtype=adapter.dtype, device=adapter.device).expand(shape)
        self._like = LayerKV(side, side)
        self._unrotated = torch.zeros(shape, device=adapter.device)  # one layer's keys, float32, used again for each

    def assemble(self, layer_idx: int, read: Mapping[str, LayerKV]) -> Assembled:
        """A layer for the whole prompt, and what the model's thread must call before it uses it.

        Args:
            layer_idx: Which layer.
            read: Its stored rows by key, each (num_kv_heads, num_tokens, head_dim), keys before RoPE, on the device.
        """
        start = time.perf_counter()
        with torch.no_grad(), self.lane.working():
            whole = self._whole(layer_idx, read)
            take_over = self.lane.hand_over(whole)
        self.seconds += time.perf_counter() - start
        return whole, take_over

    def _whole(self, layer_idx: int, read: Mapping[str, LayerKV]) -> LayerKV:
        whole = self._space.take(layer_idx, self._like)
        for segment in self._plan.segments:
            rows = slice(segment.offset, segment.offset + len(segment))
            stored = read[segment.key]
            self._unrotated[0, :, segment.start : segment.end] = stored.keys[:, rows]
            whole.values[0, :, segment.start : segment.end] = stored.values[:, rows]
        # All rows at once, also those that nothing is stored of: many small rotations take longer.
        at_places = whole.keys[:, :, : self._plan.num_tokens]
        self._adapter.rotate_into(layer_idx, at_places, self._unrotated, self._angles)
        if self._plan.kept:
            for side, kept in zip(whole, self._kept[layer_idx], strict=True):
                side[0, :, : self._plan.kept] = kept
        return whole


def is_better_beside(device: torch.device) -> bool:
    """Whether another thread should assemble layers while the model computes, rather than the model's own.

    On a CPU whose cores all take part in the model's work, another thread takes them away from it in the middle of an
    operation, for which all the others then wait: that costs more than doing one after the other, with all cores each.
    """
    return device.type != "cpu" or torch.get_num_threads() < _usable_cores()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
