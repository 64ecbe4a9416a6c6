"""Teacher forcing: the logits at every position of a given answer, behind any prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rag_blend.generation import Prefill
from rag_blend.models import cache_argument_of, lock_of


def forced_logits(model: PreTrainedModel, prefill: Prefill, answer_ids: Sequence[int]) -> torch.Tensor:
    """Logits at each position of an answer, given the answer's tokens in front of it.

    Args:
        model: The model that made the prefill.
        prefill: Of the prompt. Its cache grows by the answer and cannot be used again.
        answer_ids: The answer's tokens, at least one.

    Returns:
        Float32, shape (len(answer_ids), vocab).
    """
    first = prefill.logits[None]
    if len(answer_ids) == 1:
        return first
    input_ids = torch.tensor([answer_ids[:-1]], device=model.device)
    with lock_of(model), torch.no_grad():
        output = model(input_ids=input_ids, use_cache=True, **{cache_argument_of(model): prefill.cache})
    return torch.cat([first, output.logits[0].float()])
