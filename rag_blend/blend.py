"""The algorithm: one prefill in which most rows come from the store and only a few are computed.

The model runs its own forward over the whole prompt. Before each decoder layer the hidden states are cut down to the
rows that are computed (`before_layer`); when the layer hands its fresh keys and values to the cache, they are written
among the stored ones (`place`) and the layer attends to all of them, each row to the positions up to its own:

    layer i:   hidden states of S ──> q, k, v of S
               stored keys at their positions, stored values ──> k, v of everyone, rows of S overwritten
               (the other rows of a chunk are shifted by what those of S in it have changed by: `shift.py`)
               attention of S to everyone with mask  key_pos <= query_pos ──> hidden states of S

S always holds the tokens that no chunk covers, so the question is always computed. A selector may shrink S at its
check layer; S never grows, because a token that skipped a layer has no hidden state.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.errors import GenerationCancelledError
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan, Positions
from rag_blend.rows import LayerSource, Replay, RowSet
from rag_blend.selectors.base import TokenSelector, share_of
from rag_blend.shift import ChunkShift


class BlendPass:
    """The blend of one prompt; use it once, through `ModelAdapter.layer_hooks` and a `BlendCache`.

    Args:
        adapter: The model.
        plan: The prompt's layout.
        chosen: Reusable positions to compute from layer 0 on, ascending.
        source: Brings the stored rows.
        selector: Chose them; it may drop some at its check layer.
        ratio: Share of the reusable tokens that it keeps there; None is its default.
        cancel: Checked before each layer.
        shift: Moves the rows that are not computed; not with a selector that has a check layer. None: they stay.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: BlendPlan,
        chosen: Positions,
        source: LayerSource,
        selector: TokenSelector,
        ratio: float | None = None,
        cancel: threading.Event | None = None,
        shift: ChunkShift | None = None,
    ) -> None:
        self._adapter = adapter
        self._plan = plan
        self._selector = selector
        self._ratio = selector.default_ratio if ratio is None else ratio
        self._source = source
        self._cancel = cancel
        self._shift = shift
        self._num_tokens = plan.num_tokens
        self._fresh = self._tensor(plan.fresh)
        self._chosen = self._tensor(chosen)
        self._rows = self._rows_of(self._fresh, self._chosen)
        self._prefilled = False  # hooks stay while decoding, but then there is nothing to cut down
        self._computed = 0  # reusable rows with fresh q/k/v, summed over layers

    @property
    def recomputed_tokens(self) -> int:
        """Reusable tokens that were computed through all layers."""
        return len(self._chosen)

    @property
    def recomputed(self) -> Positions:
        """Their positions, ascending."""
        return self._chosen.cpu().numpy()

    @property
    def computed(self) -> int:
        """Reusable rows whose q/k/v were computed, summed over layers; a check layer's included."""
        return self._computed

    def before_layer(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """A `LayerHook`: hand the layer only the rows that are computed."""
        if self._prefilled:
            return hidden_states
        if self._cancel is not None and self._cancel.is_set():
            raise GenerationCancelledError("cancelled during prefill")
        if layer_idx == 0:
            self._admit(hidden_states.shape[1])
            hidden_states = hidden_states[:, self._rows.positions]
        if layer_idx == self._selector.check_layer and len(self._chosen):
            hidden_states = self._check(layer_idx, hidden_states, kwargs)
        self._computed += len(self._chosen)
        if layer_idx == self._adapter.num_layers - 1 and self._num_tokens == self._plan.num_tokens:
            hidden_states = self._finish(layer_idx, hidden_states, kwargs)
        kwargs.update(self._rows.arguments(layer_idx, kwargs))
        return hidden_states

    def place(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerKV, int]:
        """A `KVPlacer`: write fresh rows, (batch, num_kv_heads, num_rows, head_dim), among the stored ones."""
        whole = self._source.layer(layer_idx)
        self._shift_rest(layer_idx, whole, LayerKV(keys, values))
        batch = keys.shape[0]
        if batch > 1:  # beams start from the same prompt
            whole = LayerKV(*(side.expand(batch, -1, -1, -1).clone() for side in whole))
        self._rows.write(whole, LayerKV(keys, values))
        self._prefilled = layer_idx == self._adapter.num_layers - 1
        return whole, self._num_tokens

    def _admit(self, num_tokens: int) -> None:
        """Take in what assisted decoding puts behind the prompt: guessed tokens, fresh like the question."""
        if num_tokens < self._num_tokens:
            raise ValueError(f"a prefill of {num_tokens} tokens cannot blend a prompt of {self._num_tokens}")
        guessed = torch.arange(self._num_tokens, num_tokens, device=self._fresh.device)
        self._num_tokens = num_tokens
        if len(guessed):
            self._fresh = torch.cat([self._fresh, guessed])
            self._rows = self._rows_of(self._fresh, self._chosen)

    def _check(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Let the selector drop rows, by what this layer would compute for all of them."""
        everyone = self._rows
        fresh = self._adapter.fresh_kv(layer_idx, hidden_states, {**kwargs, **everyone.arguments(layer_idx, kwargs)})
        whole = self._source.layer(layer_idx)
        candidates = everyone.indices_of(self._chosen)
        stored = LayerKV(*(side[0, :, self._chosen] for side in whole))
        num_kept = min(share_of(len(self._plan.reusable), self._ratio or 0.0), len(candidates))
        kept = self._selector.refine(LayerKV(*(side[:, candidates] for side in fresh)), stored, num_kept)
        # The rows that drop out have fresh values here already: keep those, as the released CacheBlend does.
        self._go_on_over(layer_idx, whole, fresh)
        self._computed += len(self._chosen) - len(kept)
        self._chosen = self._chosen[kept.sort().values]
        self._rows = self._rows_of(self._fresh, self._chosen)
        return hidden_states[:, everyone.indices_of(self._rows.positions)]

    def _finish(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The last layer: of all rows only keys and values are wanted, and of the last row the next token."""
        fresh = self._adapter.fresh_kv(layer_idx, hidden_states, {**kwargs, **self._rows.arguments(layer_idx, kwargs)})
        whole = self._source.layer(layer_idx)
        self._shift_rest(layer_idx, whole, LayerKV(fresh.keys[None], fresh.values[None]))
        self._shift = None  # once is enough
        self._go_on_over(layer_idx, whole, fresh)
        self._rows = self._rows_of(self._rows.positions[-1:])
        return hidden_states[:, -1:]

    def _shift_rest(self, layer_idx: int, whole: LayerKV, fresh: LayerKV) -> None:
        if self._shift is not None and layer_idx > 0:  # the first layer's rows depend on nothing in front of them
            chosen = self._rows.indices_of(self._chosen)
            self._shift.apply(layer_idx, whole, LayerKV(*(side[:1, :, chosen] for side in fresh)))

    def _go_on_over(self, layer_idx: int, whole: LayerKV, fresh: LayerKV) -> None:
        """Let the layer that comes find these fresh rows among the stored ones."""
        self._rows.write(whole, LayerKV(fresh.keys[None], fresh.values[None]))
        self._source = Replay({layer_idx: whole}, self._source)

    def _tensor(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions).to(self._adapter.device)

    def _rows_of(self, *positions: torch.Tensor) -> RowSet:
        return RowSet(self._adapter, self._num_tokens, torch.cat(positions).sort().values)
