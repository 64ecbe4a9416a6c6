"""For models that cannot be blended: a prompt that begins like an earlier one goes on from there, exactly.

The model's own forward does all the work; its cache merely begins with what it held before. That is right for whatever
a token's rows depend on (windows, absolute positions), as long as it stands in front of the token. Where layers have
states that sum up all tokens so far (Mamba, linear attention), a beginning can only be used as a whole.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from rag_blend.cache import BlendCache, kv_of
from rag_blend.chunk import LayerKV
from rag_blend.generation import GenerationStats
from rag_blend.info import rope_types_of
from rag_blend.models import WeightsWatch, cache_argument_of
from rag_blend.prefixes import NOTHING, Prefix, PrefixCache
from rag_blend.selftest import random_prompt, require_equal
from rag_blend.space import OwnSpace, copied

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = Callable[[Any], tuple[T, Sequence[int]]]

_ANY_LENGTH = torch.empty(0)  # the frequencies of prompts whose rows do not depend on their length


class Continuation:
    """Runs prompts on a model that cannot be blended. Not thread-safe: the engine serialises.

    Args:
        model: The model.
        prefixes: Where beginnings are kept.

    Attributes:
        works: Whether earlier prompts are reused at all; tried out on a short random prompt.
    """

    def __init__(self, model: PreTrainedModel, prefixes: PrefixCache) -> None:
        self._model = model
        self._prefixes = prefixes
        self.weights = WeightsWatch(model)
        self._cache_argument = cache_argument_of(model)
        depends_on_length = {"dynamic", "longrope"} & set(rope_types_of(model.config))  # the rows, from the first on
        kinds = [] if depends_on_length else [_Rows(model), _States(model)]
        self._kind = next((kind for kind in kinds if self._is_right(kind)), None)
        self.works = self._kind is not None

    def run(
        self, ids: np.ndarray, reuse: bool, call: Call[T], room: int = 0, with_prefixes: bool = True
    ) -> tuple[T, GenerationStats]:
        """See `PromptRunner.run`.

        Args:
            ids: The prompt, int32, shape (num_tokens,).
            reuse: False: plain full prefill.
            call: Runs the model on what the given cache does not hold yet; None lets the model make its own.
            room: How many tokens will be decoded.
            with_prefixes: Whether earlier prompts may be used and this one kept.
        """
        if self._kind is None or not (reuse and with_prefixes):
            return call(None)[0], GenerationStats(prompt_tokens=len(ids), fresh_tokens=len(ids))
        kept = self._prefixes.find(ids, _ANY_LENGTH)
        cache = self._kind.cache_of(kept, len(ids) - len(kept) + room)
        value, token_ids = call(cache)
        length = cache.get_seq_length()
        if 0 <= len(token_ids) - length <= 1:  # an answer's last token has no row; assisted decoding may have more
            self._prefixes.keep(self._kind.prefix_of(np.asarray(token_ids[:length], dtype=np.int32), cache))
        stats = GenerationStats(
            prompt_tokens=len(ids),
            prefix_tokens=len(kept),
            fresh_tokens=len(ids) - len(kept),
            mode="prefix" if len(kept) else "full",
        )
        return value, stats

    def _is_right(self, kind: _Kind) -> bool:
        """Whether the model goes on from what was kept as if it had computed it now."""
        ids = random_prompt(self._model)
        begun = ids.shape[1] // 2
        try:
            with torch.no_grad():
                cache = kind.cache_of(NOTHING, 0)
                self._logits(ids[:, :begun], cache)
                if cache.get_seq_length() != begun:
                    return False
                kept = kind.prefix_of(ids[0, :begun].int().cpu().numpy(), cache).copy()
                self._logits(ids[:, :begun], cache)  # what goes on in the same cache must not change what is kept
                continued = self._logits(ids[:, begun:], kind.cache_of(kept, ids.shape[1] - begun))
                require_equal(self._model, continued, self._logits(ids), "going on from an earlier prompt")
        except Exception as error:  # whatever a strange cache makes of it
            logger.debug("%s: %s", type(kind).__name__, error)
            return False
        return True

    def _logits(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        given: dict[str, Any] = {} if cache is None else {self._cache_argument: cache}
        model: Any = self._model
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, **given).logits
        return logits[0, -1].float()


class _Kind(ABC):
    """How beginnings are kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def cache_of(self, kept: Prefix, room: int) -> Cache:
        """A cache that begins so, its own, with room for more tokens."""

    @abstractmethod
    def prefix_of(self, token_ids: np.ndarray, cache: Cache) -> Prefix:
        """What a cache holds of these tokens, as a view."""


class _Rows(_Kind):
    """A row of keys and values per token and layer: any number of first tokens can be used."""

    @property
    def _num_layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    def cache_of(self, kept: Prefix, room: int) -> Cache:
        """See `_Kind`."""
        space = OwnSpace(room)
        if not len(kept):
            return BlendCache(self._num_layers, space)
        rows = (LayerKV(*(side[None].to(self.model.device) for side in kv)) for kv in kept.layers)
        return BlendCache.holding([copied(kv, space, i) for i, kv in enumerate(rows)], len(kept))

    def prefix_of(self, token_ids: np.ndarray, cache: Cache) -> Prefix:
        """See `_Kind`."""
        rows = [kv_of(cache, layer_idx) for layer_idx in range(self._num_layers)]
        if len(rows[0].keys) > 1:  # beams
            return NOTHING
        return Prefix(token_ids, [LayerKV(kv.keys[0], kv.values[0]) for kv in rows], _ANY_LENGTH)


class _States(_Kind):
    """Whole caches of transformers."""

    def cache_of(self, kept: Prefix, room: int) -> Cache:
        """See `_Kind`."""
        return copy.deepcopy(kept.cache) if isinstance(kept, _Whole) else DynamicCache(config=self.model.config)

    def prefix_of(self, token_ids: np.ndarray, cache: Cache) -> Prefix:
        """See `_Kind`."""
        if any(len(tensor) > 1 for tensor in _tensors_of(cache)):  # beams
            return NOTHING
        return _Whole(token_ids, (), _ANY_LENGTH, cache=cache)


@dataclass(frozen=True, slots=True)
class _Whole(Prefix):
    """A beginning that cannot be cut."""

    cache: Cache = field(kw_only=True)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors_of(self.cache))

    def common(self, token_ids: np.ndarray, frequencies: torch.Tensor) -> int:
        begins = len(token_ids) >= len(self) and np.array_equal(self.token_ids, token_ids[: len(self)])
        return len(self) if begins else 0

    def first(self, num_tokens: int) -> Prefix:
        return self if num_tokens >= len(self) else NOTHING

    def copy(self) -> Prefix:
        return replace(self, token_ids=self.token_ids.copy(), cache=copy.deepcopy(self.cache))


def _tensors_of(cache: Cache) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        for value in vars(layer).values():
            yield from (part for part in (value.values() if isinstance(value, dict) else [value]) if _is_state(part))


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1
