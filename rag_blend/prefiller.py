"""Prefill of chunks behind their contexts, and the mean of what comes out, whatever model computes it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rag_blend.chunk import Context, LayerKV

_MOST_KEPT = 8  # more than the head alone and the sampled texts behind it; each is as large as a chunk

# From chunks' token ids to all layers of each: keys before RoPE and values, float32, (num_kv_heads, num_tokens,
# head_dim) each.
PrefillBehind = Callable[[Sequence[np.ndarray]], list[list[LayerKV]]]


class Prefilled(NamedTuple):
    """One chunk, prefilled.

    Attributes:
        layers: Keys before RoPE and values, float32, (num_kv_heads, num_tokens, head_dim) each.
        staleness: See `ChunkKV.staleness`; None if there was only one context.
    """

    layers: list[LayerKV]
    staleness: np.ndarray | None


class PrefillModel(Protocol):
    """What computes the rows of chunks: a model of transformers, or the one inside vLLM."""

    def behind(self, context: np.ndarray) -> PrefillBehind:
        """Prefill behind one context.

        Args:
            context: Token ids of head and priming text, int32, shape (num_tokens,); may be empty.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A chunk to be prefilled.

    Attributes:
        token_ids: Its token ids, int32, shape (num_tokens,).
        contexts: What it is prefilled behind, one after the other; the weights add up to 1.
    """

    token_ids: np.ndarray
    contexts: tuple[Context, ...]


class ChunkPrefiller:
    """Prefills chunks directly behind one or several contexts and takes the weighted mean of their caches.

    Args:
        model: Computes the rows.
        jobs: All that will be asked for: the caches of contexts that several of them share are computed once, and kept.
    """

    def __init__(self, model: PrefillModel, jobs: Sequence[Job]) -> None:
        self._model = model
        self._uses = Counter(context.token_ids.tobytes() for job in jobs for context in job.contexts)
        self._most_kept = max([_MOST_KEPT, *(len(job.contexts) + 1 for job in jobs)])
        self._kept: OrderedDict[bytes, PrefillBehind] = OrderedDict()

    @torch.no_grad()
    def prefill(self, jobs: Sequence[Job]) -> list[Prefilled]:
        """Prefill a batch.

        Args:
            jobs: The chunks, best of similar length.
        """
        means = [_Mean() for _ in jobs]
        together: defaultdict[bytes, list[tuple[int, Context]]] = defaultdict(list)
        for number, job in enumerate(jobs):
            for context in job.contexts:
                together[context.token_ids.tobytes()].append((number, context))
        for key, members in together.items():
            behind = self._behind(key, members[0][1].token_ids)
            chunks = {jobs[number].token_ids.tobytes(): jobs[number].token_ids for number, _ in members}
            rows = dict(zip(chunks, behind(list(chunks.values())), strict=True))
            for number, context in members:
                means[number].add(rows[jobs[number].token_ids.tobytes()], context.weight)
        return [mean.result() for mean in means]

    def _behind(self, key: bytes, context: np.ndarray) -> PrefillBehind:
        behind = self._kept.pop(key, None) or self._model.behind(context)
        if self._uses[key] > 1:
            self._kept[key] = behind
            if len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)
        return behind


class _Mean:
    """Weighted mean of one chunk's caches, and how far they differ."""

    def __init__(self) -> None:
        self._layers: list[LayerKV] = []
        self._squares: list[torch.Tensor] = []  # weighted mean square of each token, per layer and side

    def add(self, layers: Sequence[LayerKV], weight: float) -> None:
        if weight == 1.0:  # it is the only one
            self._layers = list(layers)
            return
        squares = [weight * _mean_square(side) for layer in layers for side in layer]
        weighted = [LayerKV(layer.keys * weight, layer.values * weight) for layer in layers]
        if not self._layers:
            self._layers, self._squares = weighted, squares
            return
        for total, addend in zip(self._layers, weighted, strict=True):
            total.keys.add_(addend.keys)
            total.values.add_(addend.values)
        self._squares = [total + addend for total, addend in zip(self._squares, squares, strict=True)]

    def result(self) -> Prefilled:
        if not self._squares:
            return Prefilled(self._layers, None)
        means = [_mean_square(side) for layer in self._layers for side in layer]
        # E[x^2] - E[x]^2, each side of each layer by its own scale
        spread = [(square - mean).clamp(min=0) / mean.mean() for square, mean in zip(self._squares, means, strict=True)]
        staleness = torch.stack(spread).mean(0)
        return Prefilled(self._layers, staleness.cpu().numpy().astype(np.float16))


def _mean_square(side: torch.Tensor) -> torch.Tensor:
    """Over heads and dimensions, shape (num_tokens,)."""
    return side.pow(2).mean(dim=(0, 2))
