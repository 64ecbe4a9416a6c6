"""From the results of single cases to one line per policy, with 95 % intervals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rag_blend.evaluation.bootstrap import Interval, difference_interval, mean_interval, ratio_interval
from rag_blend.evaluation.results import CaseResult, Measurement

FULL = "full prefill"
PUBLISHED = "published"  # the policy that the others' KL is set in relation to
RIGHT_F1 = 0.5  # from this F1 on, full prefill counts as having answered a case


class Count(NamedTuple):
    """So many of so many cases that could have been."""

    cases: int
    of: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy (or full prefill, or a floor) on one group of cases. None: the group has no cases to tell it by.

    Attributes:
        name: The policy's name.
        num_cases: Cases of the group.
        kl: Mean over cases of the mean KL to full prefill along the answer, nats.
        median_kl: The median instead.
        kl_to_published: Mean KL as a multiple of the published policy's, paired.
        first_kl: Mean KL at the first token.
        agreement: Mean share of positions with the same most likely token.
        first_agreement: Share of cases whose first token is the same.
        f1: Mean F1 against the answers.
        f1_gain: Mean F1 less that of full prefill, paired.
        f1_where_full_is_right: Mean F1 over the cases for which full prefill reaches 0.5.
        exact: Share of answers that match exactly.
        false_abstentions: Answerable cases on which it abstains, of those on which full prefill does not.
        lost_abstentions: Unanswerable cases on which it does not abstain, of those on which full prefill does.
        verbatim: Mean share of the wanted words reproduced (copying).
        num_tokens: Mean length of the answer.
        ttft_s: Median seconds to the first token.
        gain: Mean over cases of full prefill's seconds divided by its own.
        median_gain: The median instead.
        recompute_ratio: Mean share of reusable rows computed anew, selection included; 1 for what was full prefill.
        blended: Cases in which stored chunks were laid out; the others silently were full prefill.
        hits: Stored chunks used, in all cases together.
        misses: Stored chunks that could not be used, in all cases together.
    """

    name: str
    num_cases: int
    kl: Interval | None
    median_kl: float | None
    kl_to_published: Interval | None
    first_kl: Interval | None
    agreement: Interval | None
    first_agreement: float | None
    f1: Interval | None
    f1_gain: Interval | None
    f1_where_full_is_right: Interval | None
    exact: float | None
    false_abstentions: Count | None
    lost_abstentions: Count | None
    verbatim: Interval | None
    num_tokens: float | None
    ttft_s: float
    gain: Interval
    median_gain: float
    recompute_ratio: float
    blended: Count
    hits: int
    misses: int


def summarise(results: Sequence[CaseResult]) -> dict[str, list[Summary]]:
    """Summaries by group: full prefill, the floors, then the policies.

    Args:
        results: Of cases measured with the same policies; at least one.
    """
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    return {group: _group(members) for group, members in groups.items()}


def _group(results: Sequence[CaseResult]) -> list[Summary]:
    lines = [_summary(FULL, results, [result.full for result in results])]
    for name in results[0].floors:
        some = [result for result in results if name in result.floors]
        lines.append(_summary(name, some, [result.floors[name] for result in some]))
    lines += [_summary(name, results, [result.policies[name] for result in results]) for name in results[0].policies]
    return lines


def _summary(name: str, results: Sequence[CaseResult], measured: Sequence[Measurement]) -> Summary:
    kls = [one.fidelity.kl for one in measured if one.fidelity]
    fidelities = [one.fidelity for one in measured if one.fidelity]
    answers = [one.answer for one in measured if one.answer]
    published = [r.policies[PUBLISHED].fidelity for r in results if PUBLISHED in r.policies]
    scored = _scored(results, measured)
    right = [own for own, full in scored if full >= RIGHT_F1]
    exact = [float(answer.exact) for answer in answers if answer.exact is not None]
    verbatim = [answer.verbatim for answer in answers if answer.verbatim is not None]
    gains = [result.full.ttft_s / one.ttft_s for result, one in zip(results, measured, strict=True)]
    return Summary(
        name=name,
        num_cases=len(results),
        kl=_mean(kls),
        median_kl=statistics.median(kls) if kls else None,
        kl_to_published=ratio_interval(kls, [one.kl for one in published if one]) if kls and published else None,
        first_kl=_mean([one.first_kl for one in fidelities]),
        agreement=_mean([one.agreement for one in fidelities]),
        first_agreement=statistics.mean(float(f.first_agrees) for f in fidelities) if fidelities else None,
        f1=_mean([own for own, _ in scored]),
        f1_gain=_difference(scored) if name != FULL else None,
        f1_where_full_is_right=_mean(right),
        exact=statistics.mean(exact) if exact else None,
        false_abstentions=_abstentions(results, measured, answerable=True),
        lost_abstentions=_abstentions(results, measured, answerable=False),
        verbatim=_mean(verbatim),
        num_tokens=statistics.mean(answer.num_tokens for answer in answers) if answers else None,
        ttft_s=statistics.median(one.ttft_s for one in measured),
        gain=mean_interval(gains),
        median_gain=statistics.median(gains),
        recompute_ratio=statistics.mean(_recomputed(one) for one in measured),
        blended=Count(sum(one.stats["mode"] != "full" for one in measured), len(measured)),
        hits=sum(one.stats["hits"] for one in measured),
        misses=sum(one.stats["misses"] for one in measured),
    )


def _scored(results: Sequence[CaseResult], measured: Sequence[Measurement]) -> list[tuple[float, float]]:
    """Own F1 and full prefill's, of the cases that have answers to compare with."""
    pairs = []
    for result, one in zip(results, measured, strict=True):
        full = result.full.answer
        if one.answer and full and one.answer.f1 is not None and full.f1 is not None:
            pairs.append((one.answer.f1, full.f1))
    return pairs


def _abstentions(results: Sequence[CaseResult], measured: Sequence[Measurement], answerable: bool) -> Count | None:
    """Cases on which it abstains and full prefill does not, if answerable, or else the other way round."""
    differs: Callable[[bool], bool] = (lambda abstains: abstains) if answerable else (lambda abstains: not abstains)
    chances = [
        differs(one.answer.abstains)
        for result, one in zip(results, measured, strict=True)
        if result.answerable == answerable and one.answer and result.full.answer
        if not differs(result.full.answer.abstains)
    ]
    return Count(sum(chances), len(chances)) if chances else None


def _recomputed(one: Measurement) -> float:
    # Without anything stored the engine reports 0, for there was nothing to reuse; in a mean that would be a merit.
    return 1.0 if one.stats["mode"] == "full" else float(one.stats["recompute_ratio"])


def _difference(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    return difference_interval([own for own, _ in pairs], [full for _, full in pairs]) if pairs else None


def _mean(values: Sequence[float]) -> Interval | None:
    return mean_interval(values) if values else None
