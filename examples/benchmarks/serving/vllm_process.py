"""A vLLM server as a process, ready when it is there, and gone with all its children in the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from openai_stream import Answer, Requests, ServerError

_POLL_S = 0.5
_PATIENCE_S = 20  # for a server that was asked to stop


@dataclass(frozen=True, slots=True)
class Burst:
    """Prompts that were sent at once.

    Attributes:
        answers: In the order of the prompts.
        wall_s: Seconds from the first request until the last answer was complete.
        cpu_s: CPU seconds of the server's processes meanwhile.
    """

    answers: Sequence[Answer]
    wall_s: float
    cpu_s: float


class VllmServer:
    """A server that was started; call `wait` before anything else.

    Args:
        command: Starts it.
        variables: Its environment variables.
        port: Of 127.0.0.1, where the command makes it listen.
        log: A file for all that it prints.
        fields: Further fields of each request.
        new_tokens: Length of each answer.
        timeout_s: The longest that starting, or an answer, may take.

    Raises:
        ServerError: There is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        port: int,
        log: Path,
        fields: Mapping[str, Any],
        new_tokens: int,
        timeout_s: float,
    ) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._log = log
        self._timeout_s = timeout_s
        self._requests = Requests(f"{self._address}/v1", fields, new_tokens, timeout_s)
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise ServerError(f"it cannot be started: {error}") from error

    def wait(self) -> str:
        """Wait until it answers; returns the version of its vLLM.

        Raises:
            ServerError: It stopped, or took too long.
        """
        give_up = time.monotonic() + self._timeout_s
        while time.monotonic() < give_up:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"it stopped with exit code {code}: {self._last_error()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._address}/version", timeout=5) as answer:
                return str(json.load(answer)["version"])
            time.sleep(_POLL_S)
        raise ServerError(f"it did not answer within {self._timeout_s:g} s; see {self._log.name}")

    def ask(self, prompts: Sequence[str]) -> Burst:
        """Send prompts at once and wait for all answers.

        Raises:
            ServerError: One was not answered.
        """
        cpu, started = self._cpu_s(), time.perf_counter()
        answers = self._requests.stream(prompts)
        return Burst(answers, time.perf_counter() - started, self._cpu_s() - cpu)

    def reuse(self, prompt: str) -> Mapping[str, int]:
        """Ask a prompt; returns how many of its tokens were reused and recomputed, nothing where no chunk is stored.

        Raises:
            ServerError: It was not answered.
        """
        return self._requests.reuse(prompt)

    def close(self) -> None:
        """End it and its children, by force if they do not end by themselves."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)

    def _cpu_s(self) -> float:
        """CPU seconds so far, of the server and the processes that compute for it."""
        try:
            server = psutil.Process(self._process.pid)
            times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        except psutil.NoSuchProcess:
            raise ServerError(f"it stopped: {self._last_error()}") from None
        return float(sum(one.user + one.system for one in times))

    def _last_error(self) -> str:
        lines = [line.strip() for line in self._log.read_text("utf-8", errors="replace").split("\n") if line.strip()]
        errors = [line for line in lines if "Error" in line and "see root cause" not in line.lower()]
        return (errors or lines or ["it said nothing"])[-1]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
