"""What arithmetic allows: the matrix products and the attention of a prefill, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from rag_blend.evaluation.speed.timing import Timed, timed
from rag_blend.models.base import layers_of


@torch.no_grad()
def ideal_seconds(model: PreTrainedModel, rows: int, visible: int) -> Timed[None] | None:
    """Run a prefill's linear modules and attention alone, on random numbers.

    Each decoder layer's own `torch.nn.Linear` modules are called on `rows` rows, then SDPA of `rows` queries, spread
    evenly over the prompt, to `visible` keys; at the end the output head on one row. There are no norms, rotations,
    activations, caches, masks to build or hooks; inputs are made before the clock starts. It is the cost of computing
    `rows` rows in every layer in one pass.

    Args:
        model: The model.
        rows: Rows that are computed.
        visible: Tokens of the prompt, `rows` at least.

    Returns:
        The time; None for a mixture of experts, whose rows do not all go through the same modules.
    """
    config: Any = model.config
    if any("expert" in name for name, _ in model.named_modules()):
        return None
    linears = [[part for part in layer.modules() if isinstance(part, torch.nn.Linear)] for layer in layers_of(model)]
    widths = {part.in_features for layer in linears for part in layer}
    inputs = {width: torch.randn(rows, width, dtype=model.dtype, device=model.device) for width in widths}
    attention = _Attention(config, rows, visible, model.dtype, model.device)
    head: Any = model.get_output_embeddings()
    last = torch.randn(1, config.hidden_size, dtype=model.dtype, device=model.device)

    def run() -> None:
        for layer in linears:
            for part in layer:
                part(inputs[part.in_features])
            attention.run()
        int(head(last).argmax())  # a GPU is waited for

    return timed(run)


class _Attention:
    """SDPA of rows to keys as it is fastest: causal if all rows are there, else packed under a mask."""

    def __init__(self, config: Any, rows: int, visible: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._keys, self._values = (torch.randn(1, kv_heads, visible, dim, dtype=dtype, device=device) for _ in "kv")
        self._mask = None
        if rows == visible:
            self._queries = torch.randn(1, heads, rows, dim, dtype=dtype, device=device)
            return
        groups = heads // kv_heads
        self._queries = torch.randn(1, kv_heads, groups * rows, dim, dtype=dtype, device=device)
        positions = torch.linspace(0, visible - 1, rows, device=device).round()
        hidden = torch.arange(visible, device=device)[None, :] > positions[:, None]
        mask = torch.zeros(rows, visible, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
        self._mask = mask.repeat(groups, 1)[None, None]

    def run(self) -> None:
        scaled_dot_product_attention(
            self._queries,
            self._keys,
            self._values,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=self._mask is None,
        )
