"""Requests that find the model busy wait here, and those that go together are answered together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotYet

from rag_blend.errors import GenerationCancelledError
from rag_blend.generation import Generation
from rag_blend.serving import Request

_POLL_S = 0.05
_MOST_TOKENS = 1 << 16  # of a batch's caches


class RequestQueue:
    """First come, first served; one that comes while the model is free is answered in its own thread.

    Args:
        lock: Of the model.
        answer: Answers one request.
        answer_together: Answers several and sets their outcomes.
        go_together: Whether the second request can be answered together with the first.
        max_batch: How many are answered together at most.
    """

    def __init__(
        self,
        lock: threading.RLock,
        answer: Callable[[Request], Generation],
        answer_together: Callable[[Sequence[Request]], None],
        go_together: Callable[[Request, Request], bool],
        max_batch: int,
    ) -> None:
        self._lock = lock
        self._answer = answer
        self._answer_together = answer_together
        self._go_together = go_together
        self._max_batch = max_batch
        self._waiting: deque[Request] = deque()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()  # never held while the model is at work

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> Generation:
        """Answer a request.

        Raises:
            GenerationCancelledError: It was cancelled.
            Exception: What answering it raised.
        """
        if not self._waiting and self._lock.acquire(blocking=False):
            try:
                return self._answer(request)
            finally:
                self._lock.release()
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer requests, in any order; the first failure in their own order is raised when all have ended."""
        with self._mutex:
            self._waiting.extend(requests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-blend-batch", daemon=True)
                self._thread.start()
        try:
            for request in requests:
                self._wait(request)
        except BaseException:  # the caller's own: nobody waits for the answers any more
            for request in requests:
                request.cancel.set()
            raise
        return [request.outcome.result() for request in requests]

    def _wait(self, request: Request) -> None:
        while True:
            try:
                request.outcome.exception(timeout=_POLL_S)
                return
            except NotYet:
                if request.cancel.is_set() and self._withdraw(request):
                    request.outcome.set_exception(GenerationCancelledError("cancelled before it began"))

    def _withdraw(self, request: Request) -> bool:
        with self._mutex:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            return True

    def _work(self) -> None:
        while True:
            with self._lock:
                first = self._oldest()
                if first is not None:
                    self._answer_with_others(first)
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return

    def _oldest(self) -> Request | None:
        with self._mutex:
            return self._waiting.popleft() if self._waiting else None

    def _answer_with_others(self, first: Request) -> None:
        try:
            batch = self._with_others(first)
            if len(batch) > 1:
                self._answer_together(batch)
            else:
                first.outcome.set_result(self._answer(first))
        except BaseException as error:  # somebody waits for it, and the thread must go on for those behind
            if not first.outcome.done():
                first.outcome.set_exception(error)

    def _with_others(self, first: Request) -> list[Request]:
        """A request, and later ones that go with it."""
        batch = [first]
        with self._mutex:
            for request in list(self._waiting):
                if len(batch) == self._max_batch:
                    break
                if self._go_together(first, request) and _tokens([*batch, request]) <= _MOST_TOKENS:
                    batch.append(request)
            for request in batch[1:]:  # all at once: if the choice fails, nobody has left the queue
                self._waiting.remove(request)
        return batch


def _tokens(batch: Sequence[Request]) -> int:
    """Room that the batch takes: every row is as long as the longest."""
    return len(batch) * (max(len(r.ids) for r in batch) + max(r.max_new_tokens for r in batch))
