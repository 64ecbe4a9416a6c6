"""Move the rows of a chunk that are not recomputed as far as its recomputed rows have moved on average.

What stands in front of a chunk changes its tokens' keys and values partly in the same direction. The recomputed tokens
show that direction in each layer, before anything attends to the others, and at no further computation. AgentKVShift
shifts by mean residuals as well; here it is done within the pass, so that each layer works on the rows that the layer
before has moved. One token alone decides little: the mean is damped where few tell, and none counts for more than the
typical one of its chunk.
"""

from __future__ import annotations

import numpy as np
import torch

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.plan import BlendPlan, Positions
from rag_blend.rope import Angles

_STILL_TOKENS = 6  # so many that have not moved are added to those that tell


class ChunkShift:
    """The shifts of one prompt's blended segments.

    Args:
        adapter: The model.
        plan: The prompt's layout.
        angles: Of all positions of the prompt.
        chosen: Reusable positions that are computed, ascending.
    """

    def __init__(self, adapter: ModelAdapter, plan: BlendPlan, angles: Angles, chosen: Positions) -> None:
        self._adapter = adapter
        self._angles = angles
        ends = [np.searchsorted(chosen, (segment.start, segment.end)) for segment in plan.blended]
        telling = [(segment, *ends) for segment, ends in zip(plan.blended, ends, strict=True) if ends[0] < ends[1]]
        self._segments = [segment for segment, _, _ in telling]
        counts = [end - start for _, start, end in telling]
        # Of each segment: which of the chosen tokens are in it. Behind them stands one that is no token.
        members = np.full((len(telling), max(counts, default=0)), len(chosen))
        weights = np.zeros((len(telling), len(chosen)), dtype=np.float32)
        for number, (_, start, end) in enumerate(telling):
            members[number, : end - start] = np.arange(start, end)
            weights[number, start:end] = 1 / (end - start + _STILL_TOKENS)
        self._members = torch.from_numpy(members).to(adapter.device)
        self._weights = torch.from_numpy(weights).to(adapter.device)
        self._segment_of = torch.from_numpy(np.repeat(np.arange(len(telling)), counts)).to(adapter.device)
        self._chosen = torch.from_numpy(chosen).to(adapter.device)
        self._angles_of_chosen = Angles(*(side[..., self._chosen, :] for side in angles))

    def apply(self, layer_idx: int, stored: LayerKV, fresh: LayerKV) -> None:
        """Shift a layer's rows; those of the chosen tokens, too, over which the caller has yet to write the fresh ones.

        Args:
            layer_idx: The layer.
            stored: All rows of the prompt, keys after RoPE, (1, num_kv_heads, at least num_tokens, head_dim) each.
            fresh: Those of the chosen tokens as they were just computed, (1, num_kv_heads, num_chosen, head_dim) each.
        """
        keys, values = (new.float() - old[:, :, self._chosen].float() for new, old in zip(fresh, stored, strict=True))
        keys = self._adapter.unrotate(layer_idx, keys, self._angles_of_chosen)
        keys, values = self._weights @ self._limited(torch.cat([keys, values])).unsqueeze(1)
        values = values.to(stored.values.dtype)
        for number, segment in enumerate(self._segments):
            rows, mine = slice(segment.start, segment.end), slice(number, number + 1)
            angles = self._angles.at(segment.start, segment.end)
            self._adapter.add_rotated(layer_idx, stored.keys[:, :, rows], keys[:, :, mine], angles)
            stored.values[:, :, rows] += values[:, :, mine]

    def _limited(self, moves: torch.Tensor) -> torch.Tensor:
        """Moves, (2, num_kv_heads, num_chosen, head_dim), none farther than the median one of its chunk."""
        lengths: torch.Tensor = moves.norm(dim=-1)
        of_segments = torch.nn.functional.pad(lengths, (0, 1), value=torch.nan)[..., self._members]
        typical = of_segments.nanmedian(dim=-1).values[..., self._segment_of]
        return moves * (typical / lengths.clamp_min(1e-20)).clamp_max(1.0)[..., None]
