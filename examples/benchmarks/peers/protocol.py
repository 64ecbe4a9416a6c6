"""What a peer says on its standard input and output: one JSON object a line.

A peer loads its model and says who it is. Then it answers requests, one at a time, until its input ends:

    -> {"id": 0, "version": "...", "settings": {...}}
    <- {"id": 1, "op": "prepare", "head": "...", "texts": ["...", "..."]}
    -> {"id": 1}
    <- {"id": 2, "op": "first_token", "prompt": "..."}
    -> {"id": 2, "cpu_s": 1.2, "top1": 42}
    <- {"id": 3, "op": "details"}
    -> {"id": 3, "prompt_tokens": 1184, "cached_tokens": 0 or null, "logprobs": "<base64>" or null}

The last answer is in no time that is measured, and it comes only when nothing is left to do for its prompt.

Only the standard library is imported here: every peer runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Details(NamedTuple):
    """More about the last prompt and the first token of its answer."""

    prompt_tokens: int
    cached_tokens: int | None = None  # those that came from a cache, by the peer's own account; None: it gives none
    logprobs: bytes | None = None  # float32, shape (vocab,); None: the peer keeps them to itself


class Peer(ABC):
    """Something that a user could serve a model with.

    Attributes:
        version: Of the software that is measured.
        settings: All that its numbers depend on, for people to read.
    """

    version: str
    settings: dict[str, Any]

    def prepare(self, head: str, texts: Sequence[str]) -> None:  # noqa: B027  most have nothing to do
        """Make ready for prompts that begin with `head`, then hold `texts` in some order."""

    @abstractmethod
    def first_token(self, prompt: str, found: Callable[[int], None]) -> None:
        """Prefill a prompt; call `found` with the first token's id as soon as it is known, whatever is left to do."""

    @abstractmethod
    def details(self) -> Details:
        """Tell about the last prompt."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every peer gets; it may add its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory or GGUF file, whichever the peer reads")
    parser.add_argument("--threads", type=int, required=True, help="threads to compute with")
    parser.add_argument("--directory", required=True, help="an empty one, for files that the peer keeps")
    return parser


def serve(load: Callable[[], Peer]) -> None:
    """Load a peer and answer its requests."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(number: int, **fields: Any) -> None:
        answers.write(json.dumps({"id": number, **fields}) + "\n")
        answers.flush()

    peer = load()
    say(0, version=peer.version, settings=peer.settings)
    for line in sys.stdin:
        _answer(peer, json.loads(line), say)


def _answer(peer: Peer, request: dict[str, Any], say: Callable[..., None]) -> None:
    number = request["id"]
    match request["op"]:
        case "prepare":
            peer.prepare(request["head"], request["texts"])
            say(number)
        case "first_token":
            started = _cpu_s()
            peer.first_token(request["prompt"], lambda top1: say(number, cpu_s=_cpu_s() - started, top1=top1))
        case "details":
            details = peer.details()._asdict()
            if details["logprobs"] is not None:
                details["logprobs"] = base64.b64encode(details["logprobs"]).decode()
            say(number, **details)
        case op:
            raise ValueError(f"a peer knows the requests prepare, first_token and details, not {op!r}")


def _cpu_s() -> float:
    """CPU seconds of this process so far, those of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
