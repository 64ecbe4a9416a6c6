"""Calls to a server that may be slow, silent or gone: each ends at a deadline, and a server that fails is left alone.

A server that did not answer in time, or failed several times in a row, is not asked at all for some seconds; then by a
single call, on whose success the others follow. So a query waits for a dead server once, not once per chunk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from rag_blend.storage._threads import ThreadsWithDeadline, TooLateError

C = TypeVar("C")
T = TypeVar("T")

FAILURES = 3  # in a row, until the server is left alone
PAUSE_S = 5.0  # for so long
READERS = 16  # threads for what has to be quick; more calls at once wait for each other
WRITERS = 8  # threads for what may take long, so that it never keeps a query waiting
LONGEST_DEADLINE_S = 86400.0


class DeniedError(OSError):
    """The server answered, and the answer was no: it is full, read-only, or these credentials may not do this.

    Unlike other OSErrors it is no reason to stop asking.
    """


class Guard(Generic[C]):
    """Makes calls to one server. Safe to use from several threads, and in forked processes: each has its own clients.

    Args:
        name: The server, as errors shall name it; without passwords.
        connect: Makes a client for one thread, given the longest time in seconds that a call of it may take. It must
            not ask the server anything.
        disconnect: Ends what a client is doing, called from another thread.
        translate: Turns what the client's library raises into an OSError: FileNotFoundError and `DeniedError` are
            answers, everything else is a failure. What is not an error of the library comes back as it is.
        deadline_s: Longest time for a call on which somebody waits.
        write_deadline_s: Longest time for one that writes.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[float], C],
        disconnect: Callable[[C], None],
        translate: Callable[[Exception], Exception],
        deadline_s: float,
        write_deadline_s: float,
    ) -> None:
        if not (0 < deadline_s < LONGEST_DEADLINE_S and 0 < write_deadline_s < LONGEST_DEADLINE_S):
            raise ValueError(f"deadlines must be more than 0 s and less than a day: {deadline_s}, {write_deadline_s}")
        self.name = name
        self._connect = connect
        self._disconnect = disconnect
        self._translate = translate
        self._deadline_s = deadline_s
        self._write_deadline_s = write_deadline_s
        self._limit_s = deadline_s
        self._by_process: dict[int, _Process[C]] = {}  # neither threads, locks nor connections survive a fork

    def limit(self, seconds: float) -> None:
        """From now on `read` takes at most this long, or `deadline_s` if that is less."""
        self._limit_s = min(seconds, self._deadline_s)

    @property
    def counts(self) -> Mapping[str, int]:
        """How often calls of this process were too late, failed, were denied or not made; only what happened."""
        return self._here().breaker.counts

    def read(self, work: Callable[[C], T]) -> T:
        """Do what a query waits for.

        Args:
            work: Given a client; runs in another thread.

        Raises:
            TimeoutError: It took longer than the limit; whatever it still does is in vain.
            ConnectionError: The server is left alone for now, or cannot be reached.
            OSError: It failed.
        """
        here = self._here()
        return self._call(here.readers, work, self._limit_s)

    def look(self, work: Callable[[C], T]) -> T:
        """Like `read`, within `deadline_s` whatever the limit: for what no query waits for, such as listings."""
        here = self._here()
        return self._call(here.readers, work, self._deadline_s)

    def change(self, work: Callable[[C], T]) -> T:
        """Like `read`, within `write_deadline_s`: for writing and deleting."""
        here = self._here()
        return self._call(here.writers, work, self._write_deadline_s)

    def close(self) -> None:
        """End the threads and their connections."""
        here = self._here()
        here.readers.close()
        here.writers.close()

    def _call(self, threads: ThreadsWithDeadline[C], work: Callable[[C], T], seconds: float) -> T:
        with self._here().breaker.attempt():
            try:
                return threads.run(work, seconds)
            except TooLateError:
                raise TimeoutError(f"{self.name} did not answer within {seconds:.3g} s") from None
            except Exception as error:
                translated = self._translate(error)
                if translated is error:
                    raise
                raise translated from error

    def _here(self) -> _Process[C]:
        here = self._by_process.get(os.getpid())
        if here is None:
            here = self._by_process.setdefault(os.getpid(), self._new_process())
        return here

    def _new_process(self) -> _Process[C]:
        return _Process(
            CircuitBreaker(self.name),
            self._new_threads(READERS, self._deadline_s),
            self._new_threads(WRITERS, self._write_deadline_s),
        )

    def _new_threads(self, most: int, seconds: float) -> ThreadsWithDeadline[C]:
        threads = ThreadsWithDeadline(most, functools.partial(self._connect, seconds), self._disconnect)
        # A guard that nobody closed leaves no threads behind.
        weakref.finalize(self, _close_in, os.getpid(), threads).atexit = False
        return threads


class CircuitBreaker:
    """Whether a server is worth asking.

    Args:
        name: The server, for errors.
        clock: Seconds that only ever go on.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._open_until: float | None = None
        self._is_probed = False
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what happened: ``timeouts``, ``failures``, ``denied``, ``refused``, ``opened``."""
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Ask the server in the body, and learn from what the body raises.

        Raises:
            ConnectionError: The server is not to be asked now; the body was not run.
        """
        is_probe = self._enter()
        try:
            yield
        except OSError as error:
            self._leave(is_probe, error)
            raise
        except Exception:  # the server answered; it is not to blame for what was made of the answer
            self._leave(is_probe, None)
            raise
        except BaseException:  # the caller gave up: nothing is known
            with self._lock:
                self._is_probed = self._is_probed and not is_probe
            raise
        self._leave(is_probe, None)

    def _enter(self) -> bool:
        """Returns whether this call decides if the server is asked again."""
        with self._lock:
            if self._open_until is None:
                return False
            left = self._open_until - self._clock()
            if left > 0 or self._is_probed:
                self._counts["refused"] += 1
                until = f"for another {left:.1f} s" if left > 0 else "until a first call has succeeded"
                raise ConnectionError(f"{self._name} failed and is not asked {until}")
            self._is_probed = True
            return True

    def _leave(self, is_probe: bool, error: OSError | None) -> None:
        with self._lock:
            what = _kind(error)
            if what is not None:
                self._counts[what] += 1
            failed = what in ("timeouts", "failures")
            if is_probe:
                self._is_probed = False
                self._open_until = None
            if self._open_until is not None:
                return  # this call began before the pause did: what became of it is no news
            self._failures = self._failures + 1 if failed else 0
            if failed and (is_probe or what == "timeouts" or self._failures >= FAILURES):
                self._open_until = self._clock() + PAUSE_S
                self._counts["opened"] += 1


def _kind(error: OSError | None) -> str | None:
    """What an error is counted as."""
    if error is None or isinstance(error, FileNotFoundError):
        return None
    if isinstance(error, DeniedError):
        return "denied"
    return "timeouts" if isinstance(error, TimeoutError) else "failures"


def _close_in(process: int, threads: ThreadsWithDeadline[C]) -> None:
    if os.getpid() == process:  # in a child of it there are no such threads, and their locks may be held for ever
        threads.close()


class _Process(Generic[C]):
    """What belongs to one process."""

    def __init__(
        self, breaker: CircuitBreaker, readers: ThreadsWithDeadline[C], writers: ThreadsWithDeadline[C]
    ) -> None:
        self.breaker = breaker
        self.readers = readers
        self.writers = writers
