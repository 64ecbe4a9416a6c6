"""Logits at every position of an answer: recorded while it is generated, or by teacher forcing behind any prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel

from rag_blend.engine import Prefill
from rag_blend.models import cache_argument_of, lock_of

# A checkpoint's generation_config may penalise repetitions or sample; agreement of logits would then say nothing about
# the text. Temperature and its kin have no effect on greedy decoding, but transformers warns of them.
GREEDY: dict[str, Any] = {
    "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "temperature": 1.0, "top_p": 1.0, "top_k": 50,
}  # fmt: skip


class LogitsRecorder(LogitsProcessor):
    """Keeps the logits of every step of ``model.generate``."""

    def __init__(self) -> None:
        self._steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Take (batch, vocab) scores and change nothing."""
        self._steps.append(scores[0].float().clone())
        return scores

    def logits(self) -> torch.Tensor:
        """All of them, float32, shape (num_steps, vocab)."""
        return torch.stack(self._steps)


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
