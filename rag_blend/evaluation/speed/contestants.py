"""Ways to get the first token of a prompt: full prefill, a prefix cache, blending."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from rag_blend.engine import BlendEngine
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.prompts import adds_special_tokens, head_ids
from rag_blend.models.base import cache_argument_of
from rag_blend.prompt import common_prefix, prompt_ids


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer.

    Attributes:
        token_id: The token.
        logits: What it was chosen by, float32, shape (vocab,).
        prompt_tokens: Length of the prompt.
        rows: Rows computed in the mean layer, those included that were computed in order to choose others.
    """

    token_id: int
    logits: torch.Tensor
    prompt_tokens: int
    rows: float


class Contestant(ABC):
    """One way to answer.

    Attributes:
        name: Its name in reports.
    """

    name: str

    @abstractmethod
    def first_token(self, prompt: str) -> FirstToken:
        """From the prompt's text to the first token: all of this is timed."""

    def meet(self, prompt: str) -> None:
        """Learn a prompt for later ones, untimed; those that have ingested its chunks know it already."""
        return None

    def forget(self) -> None:
        """Drop what earlier prompts have left behind."""
        return None


class FullPrefill(Contestant):
    """The model's own forward over the whole prompt, as transformers has it."""

    name = "full prefill"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model: Any = model
        self._tokenizer = tokenizer
        self._cache_argument = cache_argument_of(model)

    def first_token(self, prompt: str) -> FirstToken:
        """See `Contestant`."""
        ids = self._ids(prompt)
        return self._forward(ids, DynamicCache(), 0)

    def _ids(self, prompt: str) -> np.ndarray:
        return prompt_ids(self._tokenizer, prompt, adds_special_tokens(self._tokenizer))

    @torch.no_grad()
    def _forward(self, ids: np.ndarray, cache: DynamicCache, held: int) -> FirstToken:
        rest = torch.from_numpy(ids[held:]).long()[None].to(self._model.device)
        output = self._model(input_ids=rest, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        logits = output.logits[0, -1].float()
        return FirstToken(int(logits.argmax()), logits, len(ids), float(len(ids) - held))


class PrefixCached(FullPrefill):
    """The same, going on in the cache of the prompt before from where the two differ.

    The cache is cut and grows in place, which is faster than copying it as a server with several prompts has to.
    """

    name = "transformers, prefix cache"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(model, tokenizer)
        self._known = np.empty(0, dtype=np.int32)
        self._cache = DynamicCache()

    def first_token(self, prompt: str) -> FirstToken:
        """See `Contestant`."""
        ids = self._ids(prompt)
        held = min(common_prefix(self._known, ids), len(ids) - 1)
        if held < len(self._known):
            self._cache.crop(held - len(self._known))  # negative: how many tokens go
        first = self._forward(ids, self._cache, held)
        self._known = ids
        return first

    def meet(self, prompt: str) -> None:
        """See `Contestant`."""
        self.first_token(prompt)

    def forget(self) -> None:
        """See `Contestant`."""
        self._known = self._known[:0]
        self._cache = DynamicCache()


class Blending(Contestant):
    """An engine under a policy; what it reuses has been ingested, or was in an earlier prompt.

    Args:
        name: Its name in reports.
        engine: The engine, this contestant's own.
        policy: The policy, of which the engine has got the part that concerns ingestion.
    """

    def __init__(self, name: str, engine: BlendEngine, policy: Policy) -> None:
        self.name = name
        self._engine = engine
        self._policy = policy

    def ingest(self, chunks: Sequence[str], progress: bool) -> None:
        """Store chunks of prompts that will come."""
        self._engine.ingest(chunks, head=head_ids(self._engine.tokenizer), progress=progress)

    def first_token(self, prompt: str) -> FirstToken:
        """See `Contestant`."""
        special = adds_special_tokens(self._engine.tokenizer)
        prefill = self._engine.prefill(prompt, add_special_tokens=special, **self._policy.call_arguments)
        token_id, stats = int(prefill.logits.argmax()), prefill.stats
        computed = stats.fresh_tokens + stats.recompute_ratio * (stats.reused_tokens + stats.recomputed_tokens)
        return FirstToken(token_id, prefill.logits, stats.prompt_tokens, computed)

    def forget(self) -> None:
        """Prompts that the engine keeps in memory; what is stored stays."""
        self._engine.refresh()
