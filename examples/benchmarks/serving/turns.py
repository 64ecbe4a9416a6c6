"""The same prompts to all servers in turn, one of them at work at a time: what disturbs one disturbs all."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai_stream import ServerError
from prompts import WARM_UP
from sessions import Case, Round
from vllm_process import Burst


class Server(Protocol):
    """What is asked; see `VllmServer`."""

    def ask(self, prompts: Sequence[str]) -> Burst:
        """Send prompts at once and wait for all answers."""

    def reuse(self, prompt: str) -> Mapping[str, int]:
        """Ask a prompt; returns what the server reports about reuse."""


@dataclass
class Results:
    """What was measured.

    Attributes:
        samples: One for each load, round, case and server.
        reuse: What servers reported about reuse, by server, length and case.
        errors: Servers that failed, and why. What they had answered before is kept.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    reuse: dict[tuple[str, int, Case], Mapping[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def measure(
    servers: Mapping[str, Server],
    rounds: Iterable[Round],
    reference: str,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """Ask every server everything.

    Args:
        servers: Running ones, by name.
        rounds: What is asked, in this order.
        reference: The server that the others' times and answers are compared with.
        progress: Is told what was done.
    """
    results = Results()
    order = deque(servers)
    for current in rounds:
        for case in current.cases:
            bursts: dict[str, Burst] = {}
            for name in order:
                if name not in results.errors:
                    try:
                        _ask(name, servers[name], current, case, bursts, results)
                    except ServerError as error:
                        results.errors[name] = f"{case}, {_described(current)}: {error}"
            order.rotate(-1)  # nobody is always the one that follows the same other one after a pause
            in_order = {name: bursts[name] for name in servers if name in bursts}
            results.samples += _samples(current, case, in_order, reference)
            times = ", ".join(f"{name} {_ttft_s(burst):.3f} s" for name, burst in in_order.items())
            progress(f"{_described(current)}, {case}: {times or 'warmed up'}")
    return results


def _ask(name: str, server: Server, current: Round, case: Case, bursts: dict[str, Burst], results: Results) -> None:
    prompts = [session.prompt(case) for session in current.sessions]
    if current.number == WARM_UP:
        results.reuse[name, current.load.length, case] = server.reuse(prompts[0])
    else:
        bursts[name] = server.ask(prompts)


def _samples(current: Round, case: Case, bursts: Mapping[str, Burst], reference: str) -> list[dict[str, Any]]:
    known = bursts.get(reference)
    samples = []
    for name, burst in bursts.items():
        answers = burst.answers
        same = known and [one.pieces[0] == other.pieces[0] for one, other in zip(answers, known.answers, strict=True)]
        samples.append(
            {
                "server": name,
                "clients": current.load.clients,
                "length": current.load.length,
                "case": case,
                "ttft_s": [answer.ttft_s for answer in answers],
                "wall_s": burst.wall_s,
                "cpu_s": burst.cpu_s,
                "new_tokens": sum(answer.new_tokens for answer in answers),
                "prompt_tokens": [answer.prompt_tokens for answer in answers],
                "cached_tokens": [answer.cached_tokens for answer in answers if answer.cached_tokens is not None],
                "gain": known and _ttft_s(known) / _ttft_s(burst),
                "same": same,
            }
        )
    return samples


def _ttft_s(burst: Burst) -> float:
    return statistics.median(answer.ttft_s for answer in burst.answers)


def _described(current: Round) -> str:
    clients = f"{current.load.clients} client{'s' if current.load.clients > 1 else ''}"
    return f"round {current.number}, {clients}, {current.load.length} tokens"
