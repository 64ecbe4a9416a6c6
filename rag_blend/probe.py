"""A cheap look ahead: run only the end of the question over the stored rows and see which of them it attends to.

The idea of FusionRAG (arXiv 2601.12904) and ProphetKV (arXiv 2602.02579): what must be right is what the question
reads. The pass costs (question tokens) / (prompt tokens) of a prefill; nothing of a chunk is computed in it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch

from rag_blend.cache import BlendCache
from rag_blend.chunk import LayerKV
from rag_blend.errors import GenerationCancelledError
from rag_blend.models import ModelAdapter
from rag_blend.models.attention import FewRows, attending, eager_attention_of
from rag_blend.plan import BlendPlan
from rag_blend.rows import LayerSource, Replay, RowSet
from rag_blend.selectors.base import Scores, probe_rows

_ATTENTION = "rag_blend_probe"


class _SeenEnough(Exception):  # not an error: it ends the model's forward
    pass


class ProbePass:
    """One pass of the question over stored rows; use it once.

    Args:
        adapter: The model.
        plan: The prompt's layout.
        source: Brings the stored rows.
        cancel: Checked before each layer.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: BlendPlan,
        source: LayerSource,
        cancel: threading.Event | None = None,
    ) -> None:
        self._adapter = adapter
        self._source = source
        self._cancel = cancel
        asking = plan.question[-probe_rows(plan) :]
        others = np.setdiff1d(plan.fresh, asking, assume_unique=True)
        positions, absent = (torch.from_numpy(side).to(adapter.device) for side in (asking, others))
        self._rows = RowSet(adapter, plan.num_tokens, positions, absent if len(absent) else None)
        self._fetched: dict[int, LayerKV] = {}
        self._received = torch.zeros(plan.num_tokens, device=adapter.device)
        self._unheard = FewRows()
        self._eager = eager_attention_of(adapter.model)
        first = adapter.num_layers // 2
        self._end = max(first + 1, adapter.num_layers * 3 // 4)
        heard = range(first, self._end)
        # A layer with a window says nothing of what lies in front of it.
        self._heard = [layer_idx for layer_idx in heard if adapter.window(layer_idx) is None] or list(heard)

    @property
    def computed(self) -> int:
        """Rows whose q/k/v the pass computes, summed over layers."""
        return len(self._rows) * self._end

    def run(self, input_ids: torch.Tensor) -> tuple[Scores, LayerSource]:
        """Run the pass over the prompt, shape (1, num_tokens).

        Returns:
            The attention that each prompt token receives from the question, averaged over heads, question tokens and
            the third quarter of the layers (the first half looks at words more than at answers, the last quarter tells
            nothing new), of which layers with a window do not count if there are others, float32, shape (num_tokens,);
            and a source of the same rows for the pass that follows, which computes the fresh ones again.
        """
        cache = BlendCache(self._adapter.num_layers, placer=self)
        arguments = {self._adapter.cache_argument: cache}
        with (
            contextlib.suppress(_SeenEnough),
            torch.no_grad(),
            attending(self._adapter.config, _ATTENTION, self.attend),
            self._adapter.layer_hooks(self.before_layer, cache),
        ):
            self._adapter.model.base_model(input_ids=input_ids, use_cache=True, **arguments)
        received = self._received / len(self._heard)
        return received.cpu().numpy(), Replay(self._fetched, self._source)

    def before_layer(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """A `LayerHook`."""
        if self._cancel is not None and self._cancel.is_set():
            raise GenerationCancelledError("cancelled during prefill")
        if layer_idx == self._end:
            raise _SeenEnough
        if layer_idx == 0:
            hidden_states = hidden_states[:, self._rows.positions]
        kwargs.update(self._rows.arguments(layer_idx, kwargs))
        return hidden_states

    def place(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerKV, int]:
        """A `KVPlacer`."""
        whole = self._source.layer(layer_idx)
        self._rows.write(whole, LayerKV(keys, values))
        self._fetched[layer_idx] = whole
        return whole, len(self._received)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention as `packed_attention`, written out where its weights are heard; query has a batch of one."""
        heard = len(self._fetched) - 1 in self._heard
        if self._eager is not None:
            output, weights = self._eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            if heard:
                assert weights is not None
                self._received += weights.float().mean(dim=(0, 1, 2))
            return output, None
        if not heard:
            return self._unheard(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        _, heads, rows, dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.reshape(kv_heads, heads // kv_heads * rows, dim)
        scores = torch.matmul(grouped, key[0].transpose(1, 2)).mul_(scaling).view(kv_heads, -1, rows, key.shape[2])
        if attention_mask is not None:
            scores = _masked(scores, attention_mask[0])
        weights = scores.softmax(-1, dtype=torch.float32)
        self._received += weights.mean(dim=(0, 1, 2))
        output = torch.matmul(weights.to(value.dtype).view(kv_heads, -1, key.shape[2]), value[0])
        return output.view(1, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return scores.add_(mask)
