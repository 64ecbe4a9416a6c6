"""All peers on the same prompts, one after the other with each prompt, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peer_process import Answer, PeerError, PeerProcess
from prompts import WARM_UP, Prompt

from rag_blend.divergence import kl


@dataclass
class Row:
    """One peer's answers to the prompts of one case and length; each list has one value a round."""

    case: str
    length: int
    ttft_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)  # empty when cold
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)  # empty where the peer does not tell
    divergences: list[float] = field(default_factory=list)  # KL of the first token; empty where it cannot be told
    same_top1: list[bool] = field(default_factory=list)  # empty without a reference

    @property
    def kl(self) -> float | None:
        """Mean KL of the first token's distribution to the reference's, in nats."""
        return statistics.fmean(self.divergences) if self.divergences else None

    def add(self, answer: Answer, prepare_s: float | None, reference: Answer | None) -> None:
        """Take in one answer, and the reference's answer to the same prompt."""
        self.ttft_s.append(answer.ttft_s)
        self.cpu_s.append(answer.cpu_s)
        self.prompt_tokens.append(answer.prompt_tokens)
        if prepare_s is not None:
            self.prepare_s.append(prepare_s)
        if answer.cached_tokens is not None:
            self.cached_tokens.append(answer.cached_tokens)
        if reference is not None:
            self.same_top1.append(answer.top1 == reference.top1)
            wanted, got = reference.logprobs, answer.logprobs
            if wanted is not None and got is not None and wanted.shape == got.shape:  # some pad their vocabulary
                self.divergences.append(float(kl(wanted[None], got[None])))


@dataclass
class Result:
    """All about one peer.

    Attributes:
        peer: Its name.
        version: As it says itself; "" if it never came up.
        settings: As it says itself.
        error: Why it is not in the table, or not in all of it; "" if nothing went wrong.
        rows: By case and length.
    """

    peer: str
    version: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def row(self, prompt: Prompt) -> Row:
        """Where answers to this prompt belong."""
        return self.rows.setdefault((prompt.case, prompt.length), Row(prompt.case, prompt.length))


def measure(
    peers: Mapping[str, PeerProcess],
    prompts: Iterable[Prompt],
    reference: str,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Result]:
    """Ask every peer every prompt.

    A peer that fails is not asked again; what it answered before is kept.

    Args:
        peers: Running ones, by name.
        prompts: In the order in which they are asked.
        reference: The peer whose distributions the others are compared with.
        progress: Is told what was done.
    """
    results = {name: Result(name, peer.version, peer.settings) for name, peer in peers.items()}
    order = list(peers)
    for prompt in prompts:
        answers: dict[str, tuple[Answer, float | None]] = {}
        for name in order:
            if not results[name].error:
                try:
                    answers[name] = _ask(peers[name], prompt)
                except PeerError as error:
                    results[name].error = f"{prompt.case}, {prompt.length} tokens: {error}"
        order.append(order.pop(0))  # nobody is always the one that follows the same other one after a pause
        if prompt.round != WARM_UP:
            truth = answers[reference][0] if reference in answers else None
            for name, (answer, prepare_s) in answers.items():
                results[name].row(prompt).add(answer, prepare_s, truth)
        times = ", ".join(f"{name} {answers[name][0].ttft_s:.3f} s" for name in peers if name in answers)
        progress(f"round {prompt.round}, {prompt.case}, {prompt.length} tokens: {times}")
    return results


def _ask(peer: PeerProcess, prompt: Prompt) -> tuple[Answer, float | None]:
    """A peer's answer, and how long it took to prepare the texts, if they were."""
    if not prompt.earlier:
        return peer.ask(prompt.text), None
    prepare_s = peer.prepare(prompt.head, prompt.chunks)
    peer.ask(prompt.earlier)
    return peer.ask(prompt.text), prepare_s
