"""The reference of a case: the greedy answer of full prefill, and the logits of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from rag_blend.engine import BlendEngine
from rag_blend.errors import PromptTooLongError
from rag_blend.evaluation.cases import Case
from rag_blend.generation import Generation

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


def reference_of(engine: BlendEngine, ids: Sequence[int], max_new_tokens: int) -> tuple[Generation, torch.Tensor]:
    """The greedy answer of full prefill, and the logits of its steps, (num_tokens, vocab)."""
    recorder = LogitsRecorder()
    generation = engine.generate(
        ids, max_new_tokens, reuse=False, logits_processor=LogitsProcessorList([recorder]), **GREEDY
    )
    return generation, recorder.logits()


def require_fit(engine: BlendEngine, case: Case, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a case that does not fit the context window together with its answer.

    Raises:
        PromptTooLongError: It does not; both numbers are in the text.
    """
    needed = num_prompt_tokens + max_new_tokens
    if needed > engine.context_window:
        raise PromptTooLongError(
            f"case {case.id!r} of {case.group} takes {needed} tokens with its answer, but the model's context "
            f"window is {engine.context_window}; use fewer passages per case"
        )
