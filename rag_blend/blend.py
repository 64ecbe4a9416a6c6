"""The algorithm: one prefill in which most rows come from the store and only a few are computed.

The model runs its own forward over the whole prompt. Before each decoder layer the hidden states are cut down to the
rows that are computed (`before_layer`); when the layer hands its fresh keys and values to the cache, they are written
among the stored ones (`place`) and the layer attends to all of them, each row to the positions up to its own:

    layer i:   hidden states of S ──> q, k, v of S
               stored keys at their positions, stored values ──> k, v of everyone, rows of S overwritten
               attention of S to everyone with mask  key_pos <= query_pos ──> hidden states of S

S always holds the tokens that no chunk covers, so the question is always computed. A selector may shrink S at its
check layer; S never grows, because a token that skipped a layer has no hidden state.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.errors import GenerationCancelledError
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan
from rag_blend.selectors.base import TokenSelector, share_of


class LayerSource(Protocol):
    """Where the stored rows come from; see `LayerPrefetcher`."""

    def layer(self, layer_idx: int) -> LayerKV:
        """Keys (after RoPE) and values, (1, num_kv_heads, num_tokens + room, head_dim), to be written to."""


class BlendPass:
    """The blend of one prompt; use it once, through `ModelAdapter.layer_hooks` and a `BlendCache`.

    Args:
        adapter: The model.
        plan: The prompt's layout.
        selector: Chooses the reusable tokens to compute.
        ratio: Share of the reusable tokens; None is the selector's default.
        source: Brings the stored rows.
        cancel: Checked before each layer.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: BlendPlan,
        selector: TokenSelector,
        ratio: float | None,
        source: LayerSource,
        cancel: threading.Event | None = None,
    ) -> None:
        self._adapter = adapter
        self._plan = plan
        self._selector = selector
        self._ratio = selector.default_ratio if ratio is None else ratio
        self._source = source
        self._cancel = cancel
        self._num_tokens = plan.num_tokens
        self._fresh = self._tensor(plan.fresh)
        self._chosen = self._tensor(selector.select(plan, ratio))
        self._rows = self._merge(self._fresh, self._chosen)
        self._shared: dict[str, Any] = {}  # layer arguments cut down to the current rows
        self._ahead: dict[int, LayerKV] = {}  # layers fetched before their turn
        self._prefilled = False  # hooks stay while decoding, but then there is nothing to cut down
        self._computed = 0  # reusable rows with fresh q/k/v, summed over layers

    @property
    def recomputed_tokens(self) -> int:
        """Reusable tokens that were computed through all layers."""
        return len(self._chosen)

    @property
    def recompute_ratio(self) -> float:
        """Fresh q/k/v rows of reusable tokens, over layers x reusable tokens; selection passes included."""
        total = self._adapter.num_layers * len(self._plan.reusable)
        return self._computed / total if total else 0.0

    def before_layer(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """A `LayerHook`: hand the layer only the rows that are computed."""
        if self._prefilled:
            return hidden_states
        if self._cancel is not None and self._cancel.is_set():
            raise GenerationCancelledError("cancelled during prefill")
        if layer_idx == 0:
            self._admit(hidden_states.shape[1])
            hidden_states = hidden_states[:, self._rows]
            self._restrict(kwargs)
        if layer_idx == self._selector.check_layer and len(self._chosen):
            hidden_states = self._check(layer_idx, hidden_states, kwargs)
        kwargs.update(self._shared)
        self._computed += len(self._chosen)
        return hidden_states

    def place(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerKV, int]:
        """A `KVPlacer`: write fresh rows, (batch, num_kv_heads, num_rows, head_dim), among the stored ones."""
        whole = self._fetch(layer_idx)
        batch = keys.shape[0]
        if batch > 1:  # beams start from the same prompt
            whole = LayerKV(*(side.expand(batch, -1, -1, -1).clone() for side in whole))
        self._write(whole, self._rows, LayerKV(keys, values))
        self._prefilled = layer_idx == self._adapter.num_layers - 1
        return whole, self._num_tokens

    def _admit(self, num_tokens: int) -> None:
        """Take in what assisted decoding puts behind the prompt: guessed tokens, fresh like the question."""
        if num_tokens < self._num_tokens:
            raise ValueError(f"a prefill of {num_tokens} tokens cannot blend a prompt of {self._num_tokens}")
        guessed = torch.arange(self._num_tokens, num_tokens, device=self._fresh.device)
        self._fresh = torch.cat([self._fresh, guessed])
        self._rows = torch.cat([self._rows, guessed])
        self._num_tokens = num_tokens

    def _check(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Let the selector drop rows, by what this layer would compute for all of them."""
        fresh = self._adapter.fresh_kv(layer_idx, hidden_states, {**kwargs, **self._shared})
        whole = self._fetch(layer_idx)
        at = torch.searchsorted(self._rows, self._chosen)
        stored = LayerKV(*(side[0, :, self._chosen] for side in whole))
        kept = share_of(len(self._plan.reusable), self._ratio or 0.0)
        chosen = self._selector.refine(LayerKV(*(side[:, at] for side in fresh)), stored, min(kept, len(at)))
        # The rows that drop out have fresh values here already: keep those, as the released CacheBlend does.
        self._write(whole, self._rows, LayerKV(fresh.keys[None], fresh.values[None]))
        self._ahead[layer_idx] = whole
        before = self._rows
        self._computed += len(self._chosen) - len(chosen)
        self._chosen = self._chosen[chosen.sort().values]
        self._rows = self._merge(self._fresh, self._chosen)
        self._restrict(kwargs)
        return hidden_states[:, torch.searchsorted(before, self._rows)]

    def _restrict(self, kwargs: dict[str, Any]) -> None:
        """Prepare a layer's arguments for the current rows, from those of the whole prompt."""
        if len(self._rows) == self._num_tokens:
            self._shared = {}  # the model's own mask is right, and its kernels for it are faster
            return
        cos, sin = kwargs["position_embeddings"]
        self._shared = {
            "position_embeddings": (cos[:, self._rows], sin[:, self._rows]),
            "attention_mask": self._mask(),
        }
        for name in ("position_ids", "cache_position"):
            if kwargs.get(name) is not None:
                self._shared[name] = kwargs[name][..., self._rows]

    def _mask(self) -> torch.Tensor:
        """Each row sees every position up to its own; shape (1, 1, num_rows, num_tokens)."""
        positions = torch.arange(self._num_tokens, device=self._rows.device)
        visible = (positions[None, :] <= self._rows[:, None])[None, None]
        if not self._adapter.attention_is_additive:
            return visible
        hidden = torch.finfo(self._adapter.dtype).min
        return torch.zeros_like(visible, dtype=self._adapter.dtype).masked_fill(~visible, hidden)

    def _fetch(self, layer_idx: int) -> LayerKV:
        return self._ahead.pop(layer_idx, None) or self._source.layer(layer_idx)

    @staticmethod
    def _write(whole: LayerKV, rows: torch.Tensor, fresh: LayerKV) -> None:
        whole.keys.index_copy_(2, rows, fresh.keys.to(whole.keys.dtype))
        whole.values.index_copy_(2, rows, fresh.values.to(whole.values.dtype))

    def _tensor(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions).to(self._adapter.device)

    @staticmethod
    def _merge(fresh: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat([fresh, chosen]).sort().values
