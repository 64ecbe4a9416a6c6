"""How far a prefill from stored caches is from full prefill: the two deviations of CacheBlend, section 4.1.

*KV deviation* of a token in a layer: the distance between its keys and values and those of full prefill. *Attention
deviation* of a layer: the L2 norm of the difference between the forward attention matrices, which hold what the last
rows of the prompt attend to. Both are taken from prefills that the engine itself runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rag_blend.cache import kv_of
from rag_blend.chunk import digest_ids
from rag_blend.engine import BlendEngine
from rag_blend.generation import Prefill
from rag_blend.match import ChunkIndex
from rag_blend.models import lock_of
from rag_blend.models.attention import attending, packed_attention
from rag_blend.plan import Positions
from rag_blend.selectors import TokenSelector

Floats = npt.NDArray[np.float64]
_ATTENTION = "rag_blend_deviation"


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """A prompt of chunks and what is asked about them.

    Attributes:
        ids: The prompt, int32, shape (num_tokens,).
        chunks: First position of each chunk and one past its last, in order of the prompt.
        question_start: First position behind all that is stored: from there on everything is always computed.
    """

    ids: np.ndarray
    chunks: tuple[tuple[int, int], ...]
    question_start: int

    @classmethod
    def locate(cls, ids: np.ndarray, head: np.ndarray, chunks: Sequence[np.ndarray]) -> PromptSpans:
        """Find chunks the way the engine does; those shorter than 16 token ids are not found.

        Args:
            ids: The prompt, int32, shape (num_tokens,).
            head: Token ids that the chunks are ingested behind. They are stored as well, and part of them may stand
                in the prompt once more (a line of dashes), even behind the last chunk.
            chunks: Token ids of each chunk.
        """
        by_key = {digest_ids(part): part for part in (head, *chunks)}
        index = ChunkIndex(by_key.__getitem__)
        for key, part in by_key.items():
            index.add(key, part)
        matches = sorted(index.match(ids), key=lambda match: match.start)
        spans = tuple((match.start, match.end) for match in matches if match.key != digest_ids(head))
        return cls(ids, spans, matches[-1].end if matches else 0)

    @property
    def later(self) -> Positions:
        """Positions of all chunks but the first: the only ones whose caches no prefix could have made exact."""
        return np.concatenate([np.arange(*span, dtype=np.int64) for span in self.chunks[1:]])


class AttentionDeviation(NamedTuple):
    """Attention deviation of one prefill, averaged over layers but the last, of which a blend computes one row only.

    Attributes:
        question: Of the rows of the question's tokens.
        last: Of the row of the last token, whose logits choose the answer's first one.
        computed: Share of the reusable rows that were computed, a selector's own passes included.
    """

    question: float
    last: float
    computed: float


class PromptDeviation:
    """Compares an engine's prefills of one prompt with full prefill, which is run once.

    Args:
        model: The engine's model.
        engine: Has ingested the prompt's chunks.
        prompt: At least two chunks and a question behind them.
    """

    def __init__(self, model: PreTrainedModel, engine: BlendEngine, prompt: PromptSpans) -> None:
        self._model = model
        self._engine = engine
        self._prompt = prompt
        self._full_attention, full = self._observed(reuse=False)
        self._full = full.cache

    def attention(self, selector: str | TokenSelector, ratio: float) -> AttentionDeviation:
        """Attention deviation (y axis of the paper's figure 6) with this share of the tokens recomputed.

        The matrices hold one row for each of the question's tokens, one column for each token in front of the
        question, and the mean over heads.
        """
        attention, prefill = self._observed(selector=selector, recompute_ratio=ratio)
        pairs = zip(attention, self._full_attention, strict=True)
        differences = [ours - full for ours, full in pairs]
        return AttentionDeviation(
            question=float(np.mean([difference.norm().item() for difference in differences])),
            last=float(np.mean([difference[-1].norm().item() for difference in differences])),
            computed=prefill.stats.recompute_ratio,
        )

    def kv(self) -> npt.NDArray[np.float32]:
        """KV deviation of every token when nothing is recomputed (the paper's figures 7 and 8).

        Returns:
            Float32, shape (num_layers, num_tokens), without unit: the L2 distance of a token's keys (after RoPE) and
            that of its values, over all heads, each divided by the mean norm of the layer's keys or values, as root
            mean square of the two. So neither outweighs the other, layers can be compared, and 1 is a deviation as
            large as the rows themselves.

        Raises:
            ValueError: Nothing of the prompt is stored.
        """
        prefill = self._engine.prefill(self._prompt.ids.tolist(), selector="none", recompute_ratio=0.0)
        if not prefill.stats.reused_tokens:
            raise ValueError("nothing of the prompt is stored: ingest its chunks behind its head first")
        layers = range(len(self._full.layers))
        return np.stack([_kv_deviation(prefill.cache, self._full, layer_idx) for layer_idx in layers])

    def _observed(self, **options: Any) -> tuple[list[torch.Tensor], Prefill]:
        """A prefill, and per layer but the last the question's attention to what is in front of it."""
        recorder = _Recorder(self._prompt, self._model.config.num_hidden_layers - 1)
        # The lock, because the attention function is swapped for every user of the model.
        with lock_of(self._model), attending(self._model.config, _ATTENTION, recorder.attend):
            prefill = self._engine.prefill(self._prompt.ids.tolist(), **options)
        return [recorder.attention[layer_idx] for layer_idx in sorted(recorder.attention)], prefill


def spearman(left: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """Spearman's rank correlation of two sequences of one length; 0 where one of them is constant.

    By numpy, because scipy is not among the dependencies: Pearson's correlation of the ranks, ties sharing theirs.
    """
    ranks = np.stack([_ranks(np.asarray(side)) for side in (left, right)])
    if (np.ptp(ranks, axis=1) == 0).any():
        return 0.0
    correlations: Floats = np.asarray(np.corrcoef(ranks))
    return float(correlations[0, 1])


def _ranks(values: npt.NDArray[Any]) -> Floats:
    """Ranks from 1, equal values getting the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: Floats = np.cumsum(counts) - (counts - 1) / 2
    return mean_ranks[inverse]


def _kv_deviation(ours: Cache, full: Cache, layer_idx: int) -> npt.NDArray[np.float32]:
    squares = []
    for got, expected in zip(kv_of(ours, layer_idx), kv_of(full, layer_idx), strict=True):
        distance = (got.float() - expected.float())[0].norm(dim=(0, 2))
        squares.append((distance / expected.float()[0].norm(dim=(0, 2)).mean()).square())
    deviation: npt.NDArray[np.float32] = torch.stack(squares).mean(dim=0).sqrt().cpu().numpy()
    return deviation


class _Recorder:
    """Keeps what the question's rows attend to while the model's own attention goes on computing.

    Args:
        prompt: The prompt that is prefilled.
        num_layers: How many layers are recorded, from the first on.
    """

    def __init__(self, prompt: PromptSpans, num_layers: int) -> None:
        self._num_layers = num_layers
        self._start = prompt.question_start
        self._num_tokens = len(prompt.ids)
        self.attention: dict[int, torch.Tensor] = {}  # by layer: (question tokens, tokens in front), mean over heads

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`packed_attention`, recorded."""
        layer_idx: Any = module.layer_idx
        if layer_idx < self._num_layers:
            self._record(layer_idx, query, key, attention_mask, kwargs["scaling"])
        return packed_attention(module, query, key, value, attention_mask, **kwargs)

    def _record(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float
    ) -> None:
        """Take rows in order of the prompt, (1, num_heads, num_rows, head_dim), of which the question's are last."""
        kv_heads, num_keys, dim = key.shape[1:]
        rows = self._num_tokens - self._start
        if mask is not None and (mask.shape[2] < rows or _num_visible(mask[0, 0, -rows]) != self._start + 1):
            raise ValueError("a part of the question is stored as a chunk: its attention cannot be compared")
        grouped = query[:, :, -rows:].float().reshape(kv_heads, -1, dim)
        scores = torch.matmul(grouped, key[0].float().transpose(1, 2)).mul_(scaling).view(-1, rows, num_keys)
        hidden = torch.ones(rows, num_keys, dtype=torch.bool, device=key.device).triu(self._start + 1)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        self.attention[layer_idx] = weights[..., : self._start].mean(dim=0)


def _num_visible(row: torch.Tensor) -> int:
    """How many keys a row of a mask, boolean or additive, lets through."""
    return int((row if row.dtype == torch.bool else row == 0).sum())
