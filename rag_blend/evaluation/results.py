"""What is measured of one case: small records, kept as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rag_blend.divergence import agreement, kl
from rag_blend.evaluation import metrics
from rag_blend.evaluation.cases import Case
from rag_blend.generation import GenerationStats


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How close logits are to those of full prefill, over the positions of full prefill's own greedy answer.

    Attributes:
        kl: Mean KL(full || other), nats.
        first_kl: The same at the first position.
        agreement: Share of positions with the same most likely token.
        first_agrees: Whether the first position is one of them.
    """

    kl: float
    first_kl: float
    agreement: float
    first_agrees: bool

    @classmethod
    def between(cls, full: torch.Tensor, other: torch.Tensor) -> Fidelity:
        """Compare logits, (num_positions, vocab) each."""
        divergence = kl(full, other)
        return cls(
            kl=float(divergence.mean()),
            first_kl=float(divergence[0]),
            agreement=agreement(full, other),
            first_agrees=agreement(full[:1], other[:1]) == 1.0,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A text and what it is worth.

    Attributes:
        text: The text.
        num_tokens: Its length, the end-of-sequence token included.
        f1: Against the case's answers, 0 to 1; None when it has none.
        exact: Whether it is one of them; None when there are none.
        abstains: Whether it says that the context holds no answer.
        verbatim: Share of the wanted words reproduced, for copying; None for other tasks.
    """

    text: str
    num_tokens: int
    f1: float | None
    exact: bool | None
    abstains: bool
    verbatim: float | None

    @classmethod
    def to(cls, case: Case, text: str, num_tokens: int) -> Answer:
        """Judge a text as the answer to a case."""
        return cls(
            text=text,
            num_tokens=num_tokens,
            f1=metrics.f1(text, case.answers) if case.answers else None,
            exact=metrics.exact_match(text, case.answers) if case.answers else None,
            abstains=metrics.abstains(text),
            verbatim=_verbatim(text, case) if case.task == "copy" else None,
        )


def _verbatim(text: str, case: Case) -> float:
    return max(metrics.verbatim_accuracy(text, wanted) for wanted in case.answers)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy on one case; or full prefill, or a floor.

    Attributes:
        fidelity: Closeness to full prefill; None for full prefill itself.
        answer: Its own greedy answer; None for floors.
        stats: What the engine reports of the prefill, with its names (`GenerationStats`).
    """

    fidelity: Fidelity | None
    answer: Answer | None
    stats: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token's logits."""
        return float(self.stats["ttft_s"])

    @classmethod
    def of(cls, stats: GenerationStats, fidelity: Fidelity | None = None, answer: Answer | None = None) -> Measurement:
        """From what an engine returned."""
        return cls(fidelity, answer, asdict(stats))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """From what `dataclasses.asdict` makes of one."""
        fidelity, answer = data["fidelity"], data["answer"]
        return cls(
            None if fidelity is None else Fidelity(**fidelity),
            None if answer is None else Answer(**answer),
            dict(data["stats"]),
        )


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Everything measured of one case.

    Attributes:
        key: Digest of the case and its prompt.
        case_id: The case's id.
        group: Data set and task: results are summarised by it.
        answerable: Whether the passages hold the answer.
        order: Policies in the order in which they ran.
        full: Full prefill; its `ttft_s` is until the first token of `generate`, a few milliseconds after the logits.
        floors: ``"full again"`` and ``"r = 1"``: how close two computations of the same thing come. Or nothing: they
            are measured on some cases only.
        policies: By name.
    """

    key: str
    case_id: str
    group: str
    answerable: bool
    order: tuple[str, ...]
    full: Measurement
    floors: dict[str, Measurement]
    policies: dict[str, Measurement]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaseResult:
        """From what `dataclasses.asdict` makes of one.

        Raises:
            LookupError: Something is missing.
            TypeError: Something is of the wrong kind.
        """
        named = {
            side: {name: Measurement.from_json(one) for name, one in data[side].items()}
            for side in ("floors", "policies")
        }
        full = Measurement.from_json(data["full"])
        return cls(**{**data, "order": tuple(data["order"]), "full": full, **named})
