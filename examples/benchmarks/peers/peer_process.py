"""The driver's end of `protocol`: a peer as a process that computes only while it is asked."""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class PeerError(Exception):
    """A peer stopped, did not answer in time, or answered what nobody understands."""


@dataclass(frozen=True)
class Answer:
    """What a peer did with a prompt.

    Attributes:
        ttft_s: From handing over the prompt until its first token was known here.
        cpu_s: CPU seconds of all the peer's threads meanwhile.
        top1: The first token.
        prompt_tokens: Length of the prompt by the peer's own count.
        cached_tokens: Of these, those from a cache, if it tells.
        logprobs: Of the first token, float32, shape (vocab,), if it tells.
    """

    ttft_s: float
    cpu_s: float
    top1: int
    prompt_tokens: int
    cached_tokens: int | None
    logprobs: torch.Tensor | None


class PeerProcess:
    """A running peer.

    Args:
        command: Starts it.
        environment: Its environment variables.
        directory: Where it is started.
        log: A file for its standard error.
        timeout_s: The longest it may take to start, and for each answer.

    Raises:
        PeerError: It did not come up.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path, timeout_s: float
    ) -> None:
        self._log = log
        self._timeout_s = timeout_s
        self._number = 0
        self._lines: queue.Queue[str] = queue.Queue()
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=directory,
                    env=environment, text=True, encoding="utf-8",
                )  # fmt: skip
        except OSError as error:
            raise PeerError(f"it cannot be started: {error}") from error
        threading.Thread(target=self._read, daemon=True).start()
        try:
            hello = self._receive()
            self.version, self.settings = str(hello["version"]), dict(hello["settings"])
        except BaseException:
            self.close()
            raise

    def prepare(self, head: str, texts: Sequence[str]) -> float:
        """Have it made ready for prompts with this head and these texts; the seconds that took."""
        started = time.perf_counter()
        self._ask("prepare", head=head, texts=texts)
        return time.perf_counter() - started

    def ask(self, prompt: str) -> Answer:
        """Have a prompt prefilled, and wait until the peer has nothing more to do."""
        started = time.perf_counter()
        first = self._ask("first_token", prompt=prompt)
        ttft_s = time.perf_counter() - started
        details = self._ask("details")
        return Answer(
            ttft_s,
            first["cpu_s"],
            first["top1"],
            details["prompt_tokens"],
            details["cached_tokens"],
            _decoded(details["logprobs"]),
        )

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._number += 1
        try:
            self._process.stdin.write(json.dumps({"id": self._number, "op": op, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._stopped() from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"no answer within {self._timeout_s:g} s") from None
        if not line:
            raise self._stopped()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("id") != self._number:
            raise PeerError(f"it said {line[:80].strip()!r} instead of answering request {self._number}")
        return answer

    def _stopped(self) -> PeerError:
        code = self._process.wait()
        lines = self._log.read_text("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return PeerError(f"it stopped with exit code {code}: {last}")


def _decoded(encoded: str | None) -> torch.Tensor | None:
    if encoded is None:
        return None
    logprobs = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.float32)
    if not logprobs.isfinite().all():
        raise PeerError("its log-probabilities are not all finite")
    return logprobs
