"""A bounded queue of jobs that one thread does in order, behind the caller's back."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping

from rag_blend.storage._fork import repair_after_fork

logger = logging.getLogger(__name__)

EXIT_SECONDS = 5.0  # how long the end of the process waits for all queues together
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_ATTEMPTS = 2  # of a job that is refused; while a medium is away, there is no limit


class Job(ABC):
    """Something to be done later.

    Attributes:
        name: What `Lane.wait_out` knows it by.
        size: Bytes it keeps in memory.
        is_patient: It is tried again whatever the error, for as long as the lane is open.
        must_finish: Giving it up now would leave behind what should not be there: not even `Lane.close` does.
    """

    name: str
    size: int
    is_patient: bool = False
    must_finish: bool = False

    @abstractmethod
    def run(self) -> None:
        """Do it; called again after an OSError."""

    def end(self) -> None:
        """Called once, when it is done or given up."""
        return None


class Lane:
    """Jobs in the order in which they came. There is a thread only while there are jobs.

    A job that fails because the medium is away (TimeoutError, ConnectionError) is tried again, after longer and longer
    pauses, and the others wait behind it. One that is refused is tried twice and given up.

    When the queue is full, `put` waits as long as something moves. When nothing has moved for `patience_s`, jobs are
    turned away at once, so a medium that hangs delays a writer once and not for every entry.

    Args:
        name: In messages.
        capacity: Bytes that jobs may keep in memory; one that is larger waits alone. None: somebody else counts.
        patience_s: How long a full queue may stand still.
    """

    def __init__(self, name: str, capacity: int | None = None, patience_s: float = 10.0) -> None:
        self._name = name
        self._capacity = capacity
        self._patience_s = patience_s
        self._counts: Counter[str] = Counter()
        self.after_fork()
        repair_after_fork(self)
        _LANES.add(self)

    def after_fork(self) -> None:
        """Begin anew: the jobs are those of the process that this one was forked from."""
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()  # the first one is under way, or waits to be tried again
        self._bytes = 0
        self._running: Job | None = None
        self._is_away = False
        self._has_thread = False
        self._is_closed = False
        self._moved_at = time.monotonic()

    @property
    def counts(self) -> Mapping[str, int]:
        """``queued`` and ``dropped`` so far; ``waiting`` and ``waiting_bytes`` now."""
        with self._changed:
            return {**self._counts, "waiting": len(self._jobs), "waiting_bytes": self._bytes}

    @property
    def is_away(self) -> bool:
        """Whether the medium did not answer when it was last asked here."""
        return self._is_away

    def put(self, job: Job, waits: bool = True) -> bool:
        """Have a job done later.

        Args:
            job: The job.
            waits: It is turned away while the queue is full and nothing moves.

        Returns:
            Whether it was taken; if not, it has been counted and ended.
        """
        with self._changed:
            taken = not self._is_closed and (not waits or self._has_room(job.size)) and self._is_served()
            if taken:
                if not self._jobs:
                    self._moved_at = time.monotonic()
                self._jobs.append(job)
                self._bytes += job.size
                self._counts["queued"] += 1
        if not taken:
            self._drop(job, "closed" if self._is_closed else "the queue is full and nothing moves")
        return taken

    def wait_out(self, name: str, seconds: float, and_release: bool = False) -> None:
        """Wait until no job of this name is being done; one that waits for its turn does not count.

        Args:
            name: The name.
            seconds: How long to wait.
            and_release: Those that wait to be tried again have nothing to finish any more.

        Raises:
            TimeoutError: It takes too long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._running is None or self._running.name != name, seconds):
                raise TimeoutError(f"a write to {self._name} is still under way")
            for job in self._jobs:
                job.must_finish = job.must_finish and not (and_release and job.name == name)

    def flush(self, seconds: float | None) -> bool:
        """Wait until everything is done; returns whether it is. A job that failed is tried again at once."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._jobs, seconds)

    def close(self) -> bool:
        """Take no more jobs and give up those that wait; returns whether none is still being done."""
        with self._changed:
            self._is_closed = True
            kept = [job for job in self._jobs if job is self._running or job.must_finish]
            waiting = [job for job in self._jobs if job not in kept]
            self._jobs = deque(kept)
            self._bytes = sum(job.size for job in kept)
            self._changed.notify_all()
        for job in waiting:
            self._drop(job, "closed before it could be written")
        return not kept

    def _has_room(self, size: int) -> bool:
        while self._capacity is not None and self._jobs and self._bytes + size > self._capacity:
            left = self._moved_at + self._patience_s - time.monotonic()
            if left <= 0 or self._is_closed:
                return False
            self._changed.wait(left)
        return True

    def _is_served(self) -> bool:
        if not self._has_thread:
            try:
                threading.Thread(target=self._work, name=f"rag-blend-{self._name}", daemon=True).start()
            except RuntimeError:  # the interpreter is ending
                return False
            self._has_thread = True
        return True

    def _work(self) -> None:
        pause_s, attempts = _FIRST_PAUSE_S, 0
        while (job := self._next()) is not None:
            error = _error_of(job)
            attempts += 1
            again = error is not None and self._is_tried_again(job, error, attempts)
            if not again:
                if error is not None:
                    self._drop(job, error)
                else:
                    job.end()
                pause_s, attempts = _FIRST_PAUSE_S, 0
            with self._changed:
                self._running = None
                self._is_away = again
                if not again:
                    self._moved_at = time.monotonic()
                    if self._jobs and self._jobs[0] is job:
                        self._jobs.popleft()
                        self._bytes -= job.size
                self._changed.notify_all()
                if again:
                    self._changed.wait(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _next(self) -> Job | None:
        with self._changed:
            if not self._jobs:
                self._has_thread = False
                return None
            self._running = self._jobs[0]
            return self._running

    def _is_tried_again(self, job: Job, error: Exception, attempts: int) -> bool:
        if job.must_finish:
            return True
        is_away = isinstance(error, TimeoutError | ConnectionError)
        is_worth_it = job.is_patient or is_away or (isinstance(error, OSError) and attempts < _ATTEMPTS)
        return is_worth_it and not self._is_closed

    def _drop(self, job: Job, reason: object) -> None:
        with self._changed:
            level = logging.DEBUG if self._counts["dropped"] else logging.WARNING
            self._counts["dropped"] += 1
        logger.log(level, "%s does not get everything that was meant for it, see its counts: %s", self._name, reason)
        job.end()


def _error_of(job: Job) -> Exception | None:
    try:
        job.run()
    except Exception as error:  # a thread that died would take all later jobs with it
        if not isinstance(error, OSError):
            logger.exception("a job in the background failed")
        return error
    return None


_LANES: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """A process that ends without closing its storage: what it has written is given some seconds to arrive."""
    give_up = time.monotonic() + EXIT_SECONDS
    for lane in list(_LANES):
        lane.flush(max(0.0, give_up - time.monotonic()))
        lane.close()
