"""A store that hangs is given up: it is waited for no longer, and not asked again until it has answered.

A network file system or a dying disk may hold a read for minutes, and nothing ends such a call. So calls are made in
threads that can be left behind. While one of them is, the store counts as hanging: they stay few, nobody waits twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

DEADLINE_S = 2.0  # more than a remote tier's own, so that one of several tiers is not taken to hang for it
_POLL_S = 0.1


class HangingStoreError(TimeoutError):
    """The store does not answer, and does not fail either."""


class Patience:
    """Decides for how long to wait for a store. Thread-safe.

    Args:
        deadline_s: How long nothing may happen, in seconds. None: the store ends its calls itself.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self._left_behind: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Do what may hang.

        Args:
            work: What to do; in another thread, if it may hang.
            undo: Is given what `work` returns after all, when nobody waits for it any more.

        Raises:
            HangingStoreError: It takes too long, or something else has not returned yet.
        """
        if self._deadline_s is None:
            return work()
        self._require_hope()
        future: Future[T] = Future()
        threading.Thread(target=fulfil, args=(future, work), name="rag-blend-open", daemon=True).start()
        try:
            return self.wait(future)
        except HangingStoreError:
            self.give_up(future, lambda: None if future.exception() else undo(future.result()))
            raise

    def wait(self, future: Future[T], news: Callable[[], int] = lambda: 0) -> T:
        """The result of what a thread does.

        Args:
            future: What it will have done.
            news: A number that changes as long as it gets on.

        Raises:
            HangingStoreError: It does not get on, or something else has not returned yet.
        """
        if self._deadline_s is None:
            return future.result()
        quiet_s = 0.0  # in polls, not by a clock: when this process itself stands still, that is not the store's fault
        while not future.done():
            self._require_hope()
            if quiet_s >= self._deadline_s:
                raise HangingStoreError(f"the store has not answered for {self._deadline_s:.3g} s")
            before = news()
            try:
                future.exception(timeout=_POLL_S)
            except TimeoutError:
                quiet_s = quiet_s + _POLL_S if news() == before else 0.0
        return future.result()

    def give_up(self, future: Future[Any], clean_up: Callable[[], object] = lambda: None) -> None:
        """Leave a thread behind: until `future` is done, the store is not asked. Then the thread calls `clean_up`."""

        def is_back(_: Future[Any]) -> None:
            with self._lock:
                self._left_behind.discard(future)
            clean_up()

        with self._lock:
            self._left_behind.add(future)
        future.add_done_callback(is_back)

    def _require_hope(self) -> None:
        if self._left_behind:
            raise HangingStoreError("the store has not answered an earlier call yet")


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Give a future what `work` returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
