"""Calibration: which selector and ratio stay close enough to full prefill on one's own prompts, and cost least."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.calibration import DEFAULT_TARGET_AGREEMENT, DEFAULT_TARGET_KL, Verdict
from rag_blend.engine import BlendEngine, Storage
from rag_blend.evaluation import prompts
from rag_blend.evaluation.bootstrap import Interval, mean_interval
from rag_blend.evaluation.cases import Case, ingestible
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.reference import reference_of, require_fit
from rag_blend.evaluation.report import json_text
from rag_blend.evaluation.results import Fidelity, Measurement
from rag_blend.teacher import forced_logits

logger = logging.getLogger(__name__)

_DOCUMENT = "rag_blend calibration"  # what is cached for measuring belongs to it, and is forgotten with it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selector and its ratio; None is its own default."""

    selector: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        """As it is shown."""
        return self.selector if self.ratio is None else f"{self.selector} {self.ratio:.0%}"


CANDIDATES = (
    Candidate("heads"),
    Candidate("spread"),
    *(Candidate("anchor", r) for r in (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)),
)


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What was measured of one candidate; intervals are 95 %, by bootstrap over cases.

    Attributes:
        candidate: The candidate.
        kl: Mean KL(full || candidate), nats.
        agreement: Mean share of positions with the same most likely token.
        recompute_ratio: Work done on reusable tokens, a selector's own passes included; the mean.
        gain: Full prefill's time to first token by the candidate's, the mean over cases.
        passed: Whether both means meet the target, and the candidate is faster than full prefill.
    """

    candidate: Candidate
    kl: Interval
    agreement: Interval
    recompute_ratio: float
    gain: Interval
    passed: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        verdict: The verdict, as the store has it now.
        results: The candidates measured, cheapest first; the last one is the choice if the verdict is a pass.
        environment: Where it was measured.
    """

    verdict: Verdict
    results: tuple[CandidateResult, ...]
    environment: dict[str, str]

    def to_json(self) -> str:
        """All of it; intervals as estimate, low, high; null for what is not finite."""
        results = [
            {**asdict(result), **{name: getattr(result, name)._asdict() for name in ("kl", "agreement", "gain")}}
            for result in self.results
        ]
        data = {"verdict": asdict(self.verdict), "results": results, "environment": self.environment}
        return json_text(data)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    storage: Storage,
    target_kl: float = DEFAULT_TARGET_KL,
    target_agreement: float = DEFAULT_TARGET_AGREEMENT,
    candidates: Sequence[Candidate] = CANDIDATES,
    progress: bool = True,
    *,
    max_new_tokens: int = 32,
    **engine_options: Any,
) -> Calibration:
    """Find the cheapest candidate that meets the target, and record the verdict in the store.

    Candidates are ordered by the work they do on the first case, then measured one after the other on all cases until
    one passes: mean KL and agreement along full prefill's own greedy answers (teacher forcing). One that is no faster
    than full prefill does not, however close it comes.

    The passages are cached in the store while this runs and forgotten when it ends, so that nothing but the verdict
    stays. (Whatever was stored without a document id behind the same head goes with them.) The logits of full prefill
    are kept in memory: cases x tokens x vocabulary x 4 bytes, 0.5 GB for 24 cases, 32 tokens and 150,000 words.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cases: Prompts like those to be answered; two dozen are enough for most.
        storage: Where the engine that shall follow the verdict has its caches.
        target_kl: Largest mean KL, nats.
        target_agreement: Smallest mean agreement, 0 to 1.
        candidates: What is tried.
        progress: Show progress bars.
        max_new_tokens: Longest answer.
        engine_options: `namespace`, `prime`, `prime_tokens`, `prime_texts`, `exact_first`, `kv_dtype`, `codec`, as that
            engine has them.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A case does not fit the context window.
        ValueError: An argument is out of its range, or no case has a passage that is long enough to be reused.
        OSError: The storage refused.
    """
    if not candidates or target_kl < 0.0 or not 0.0 <= target_agreement <= 1.0:
        raise ValueError("calibration needs candidates, a target KL of at least 0 and an agreement between 0 and 1")
    # Each candidate must do its own work on the same prompts, worth its while or not.
    engine_options |= {"prefix_cache_bytes": 0, "reuse_when": "possible", "on_unsupported": "measured"}
    with BlendEngine(model, tokenizer, storage, **engine_options) as engine, _cached(engine, cases, max_new_tokens):
        references = list(_references(engine, cases, max_new_tokens, progress))
        if not references:
            raise ValueError("no case has a passage that can be reused, so there is nothing to calibrate")
        results: list[CandidateResult] = []
        for candidate in _by_cost(engine, references[0], candidates):
            bar = tqdm(references, desc=candidate.name, disable=not progress)
            measured = [_measured(engine, model, reference, candidate) for reference in bar]
            results.append(_result(candidate, references, measured, target_kl, target_agreement))
            if results[-1].passed:
                break
        environment = environment_of(model)
        verdict = _verdict(results, target_kl, target_agreement, len(references), environment["date"])
        engine.adopt(verdict)
    return Calibration(verdict, tuple(results), environment)


@dataclass(frozen=True, slots=True)
class _Reference:
    ids: list[int]
    answer_ids: list[int]
    logits: torch.Tensor  # (num_answer_tokens, vocab), on the CPU: all cases' are kept
    ttft_s: float


@contextlib.contextmanager
def _cached(engine: BlendEngine, cases: Sequence[Case], max_new_tokens: int) -> Iterator[None]:
    """The cases' passages, cached behind the prompts' head for as long as this lasts."""
    for case in cases:
        require_fit(engine, case, len(prompts.case_ids(engine.tokenizer, case)), max_new_tokens)
    documents = {
        text: f"{_DOCUMENT} of {document}" if document else f"{_DOCUMENT} {number}"  # no neighbours of each other
        for number, (text, document) in enumerate(ingestible(cases).items())
    }
    try:
        engine.ingest(list(documents), prompts.head_ids(engine.tokenizer), list(documents.values()), progress=False)
        yield
    finally:
        engine.forget(documents.values())


def _references(
    engine: BlendEngine, cases: Sequence[Case], max_new_tokens: int, progress: bool
) -> Iterator[_Reference]:
    """Full prefill's answers to those cases in which anything can be blended: others say nothing about blending."""
    for case in tqdm(cases, desc="full prefill", disable=not progress):
        ids = prompts.case_ids(engine.tokenizer, case)
        if engine.prefill(ids, selector="none").stats.mode != "blend":
            logger.warning("case %s is left out: none of its passages can be reused", case.id)
            continue
        answer, logits = reference_of(engine, ids, max_new_tokens)
        ttft_s = engine.prefill(ids, reuse=False).stats.ttft_s  # not the answer's: `generate` has work of its own
        yield _Reference(ids, answer.token_ids, logits.cpu(), ttft_s)


def _by_cost(engine: BlendEngine, reference: _Reference, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Cheapest first, by the work on one prompt; so each has run once before its time is taken."""

    def cost(candidate: Candidate) -> float:
        stats = engine.prefill(reference.ids, selector=candidate.selector, recompute_ratio=candidate.ratio).stats
        return stats.recompute_ratio

    return sorted(candidates, key=cost)


def _measured(engine: BlendEngine, model: PreTrainedModel, reference: _Reference, candidate: Candidate) -> Measurement:
    prefill = engine.prefill(reference.ids, selector=candidate.selector, recompute_ratio=candidate.ratio)
    forced = forced_logits(model, prefill, reference.answer_ids)
    return Measurement.of(prefill.stats, Fidelity.between(reference.logits, forced.cpu()))


def _result(
    candidate: Candidate,
    references: Sequence[_Reference],
    measured: Sequence[Measurement],
    target_kl: float,
    target_agreement: float,
) -> CandidateResult:
    fidelities = [one.fidelity for one in measured if one.fidelity is not None]
    kl = mean_interval([fidelity.kl for fidelity in fidelities])
    agreement = mean_interval([fidelity.agreement for fidelity in fidelities])
    gains = [reference.ttft_s / one.ttft_s for reference, one in zip(references, measured, strict=True)]
    gain = mean_interval(gains)
    close_enough = kl.estimate <= target_kl and agreement.estimate >= target_agreement
    return CandidateResult(
        candidate=candidate,
        kl=kl,
        agreement=agreement,
        recompute_ratio=fmean(one.stats["recompute_ratio"] for one in measured),
        gain=gain,
        passed=close_enough and gain.estimate > 1.0,
    )


def _verdict(
    results: Sequence[CandidateResult], target_kl: float, target_agreement: float, num_cases: int, date: str
) -> Verdict:
    chosen = results[-1] if results[-1].passed else min(results, key=lambda result: result.kl.estimate)
    return Verdict(
        selector=chosen.candidate.selector,
        ratio=chosen.candidate.ratio,
        passed=chosen.passed,
        target_kl=target_kl,
        target_agreement=target_agreement,
        kl=chosen.kl.estimate,
        agreement=chosen.agreement.estimate,
        recompute_ratio=chosen.recompute_ratio,
        gain=chosen.gain.estimate,
        num_cases=num_cases,
        date=date,
    )
