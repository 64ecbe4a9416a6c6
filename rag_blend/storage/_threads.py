"""Calls that end when their time is up, whatever they wait for.

A socket's timeout is not enough: it starts anew with every byte, so a server that trickles would hold a query for
minutes. So a call is made in another thread, and the caller stops waiting for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

C = TypeVar("C")
T = TypeVar("T")


class TooLateError(Exception):
    """The caller stopped waiting."""


class ThreadsWithDeadline(Generic[C]):
    """Threads with a client each. They are made when needed and kept; one whose call hangs is cut off and replaced.

    Args:
        most: How many there may be, counting those that are cut off but have not ended yet.
        connect: Makes a client.
        disconnect: Ends what a client is doing.
    """

    def __init__(self, most: int, connect: Callable[[], C], disconnect: Callable[[C], None]) -> None:
        self._connect = connect
        self._disconnect = disconnect
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[_Thread[C]] = []
        self._is_closed = False

    def run(self, work: Callable[[C], T], seconds: float) -> T:
        """Have a thread do `work`, and wait for it no longer than `seconds`; that they are all busy counts as well."""
        give_up = time.monotonic() + seconds
        if not self._free.acquire(timeout=seconds):
            raise TooLateError
        try:
            thread = self._take()
        except BaseException:
            self._free.release()
            raise
        job = _Job(work)
        thread.jobs.put(job)
        try:
            if not job.done.wait(give_up - time.monotonic()):
                # If this process itself stood still (a garbage collection may take a second), that time is given back.
                job.done.wait(min(time.monotonic() - give_up, seconds))
        finally:  # the caller may have been interrupted as well
            is_late = self._give_up(thread, job)
        if is_late:
            raise TooLateError
        return job.outcome()

    def close(self) -> None:
        """End the threads, those at work when they have finished."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.jobs.put(None)

    def _take(self) -> _Thread[C]:
        with self._lock:
            if self._idle:
                return self._idle.pop()  # the one used last: its connection is the freshest
        thread = _Thread(self._connect())
        try:
            threading.Thread(target=self._serve, args=(thread,), name="rag-blend-remote", daemon=True).start()
        except RuntimeError as error:
            raise OSError(f"no thread can be started: {error}") from error
        return thread

    def _give_up(self, thread: _Thread[C], job: _Job[C, T]) -> bool:
        """Cut the thread off unless it has finished; returns whether it had not."""
        with self._lock:
            if job.done.is_set():
                return False
            job.is_given_up = True
        self._disconnect(thread.client)
        return True

    def _serve(self, thread: _Thread[C]) -> None:
        while (job := thread.jobs.get()) is not None:
            job.run(thread.client)
            with self._lock:
                job.done.set()
                is_last = job.is_given_up or self._is_closed
                if not is_last:
                    self._idle.append(thread)
            self._free.release()
            del job  # or what it returned would be kept until the next one comes
            if is_last:
                break
        self._disconnect(thread.client)


class _Thread(Generic[C]):
    def __init__(self, client: C) -> None:
        self.client = client
        self.jobs: SimpleQueue[_Job[C, Any] | None] = SimpleQueue()


class _Job(Generic[C, T]):
    """One call on its way through a thread."""

    def __init__(self, work: Callable[[C], T]) -> None:
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        self.is_given_up = False

    def run(self, client: C) -> None:
        try:
            self._result.append(self._work(client))
        except BaseException as error:
            self._error = error

    def outcome(self) -> T:
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # a panic of a library written in Rust is no Exception
            raise OSError(f"{type(self._error).__name__}: {self._error}")
        return self._result[0]
