"""Prefill of chunks behind a context by the model inside vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load

from rag_blend.chunk import LayerKV
from rag_blend.models import ModelAdapter
from rag_blend.prefiller import PrefillBehind
from rag_blend.rope import Angles

if TYPE_CHECKING:
    from vllm import LLM


class VllmPrefill:
    """See `PrefillModel`. Each rank computes its heads; here they are put together.

    Keys arrive after RoPE and are un-rotated in float32 by transformers' rotary module, which is what the Hugging Face
    engine does with those of its own cache. Taking them in front of vLLM's rotary module would spare one rounding, but
    would be another thing: some families normalise keys only behind it, some layers have none, and compiled models do
    not call it.

    Args:
        llm: A vLLM that runs with `BlendWorker` and has no requests.
        geometry: The model as transformers knows it.
    """

    def __init__(self, llm: LLM, geometry: ModelAdapter) -> None:
        self._llm = llm
        self._geometry = geometry

    def behind(self, context: np.ndarray) -> PrefillBehind:
        """Prefill behind one context, chunk by chunk; workers keep its rows as long as nothing else comes between."""
        return partial(self._prefill, context)

    def _prefill(self, context: np.ndarray, chunks: Sequence[np.ndarray]) -> list[list[LayerKV]]:
        start = len(context)
        angles = self._geometry.rotary.angles(start + max(map(len, chunks)), torch.device("cpu"))
        return [self._rows(context, chunk, angles.at(start, start + len(chunk))) for chunk in chunks]

    def _rows(self, context: np.ndarray, chunk: np.ndarray, angles: Angles) -> list[LayerKV]:
        token_ids = [*context.tolist(), *chunk.tolist()]
        ranks = self._llm.collective_rpc("prefill_rows", args=(token_ids, len(context)))
        layers = []
        for layer_idx, (keys, values) in enumerate(self._joined(ranks, len(chunk))):
            unrotated = self._geometry.unrotate(layer_idx, keys[None], angles)
            layers.append(LayerKV(unrotated[0], values))
        return layers

    def _joined(self, ranks: Sequence[tuple[int, bytes]], num_tokens: int) -> list[torch.Tensor]:
        """All heads of each layer, float32, (2, num_kv_heads, num_tokens, head_dim).

        Raises:
            RuntimeError: Something is missing.
        """
        geometry = self._geometry
        shape = (2, geometry.num_kv_heads, num_tokens, geometry.head_dim)
        layers = [torch.empty(shape) for _ in range(geometry.num_layers)]
        missing = {(layer_idx, head) for layer_idx in range(len(layers)) for head in range(geometry.num_kv_heads)}
        for first, file in ranks:
            for layer_idx, rows in enumerate(_layers_in(file)[: len(layers)]):
                last = first + rows.shape[1]
                if rows.shape == layers[layer_idx][:, first:last].shape:
                    layers[layer_idx][:, first:last] = rows
                    missing -= {(layer_idx, head) for head in range(first, last)}
        if missing:
            raise RuntimeError(
                f"vLLM's workers delivered a chunk of {num_tokens} tokens without {len(missing)} of its "
                f"{geometry.num_kv_heads} KV heads x {geometry.num_layers} layers; it is not stored. "
                "All of them must run the same version of rag_blend."
            )
        return layers


def _layers_in(file: bytes) -> list[torch.Tensor]:
    """See `ScratchPrefill.rows`."""
    return [rows for _, rows in sorted(load(file).items())]
