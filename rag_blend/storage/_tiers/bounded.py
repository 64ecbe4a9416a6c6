"""Questions to a tier that may hang: the answer is awaited for a moment only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Makes calls in threads of their own. While one is overdue no more are made: so there are few, and nobody waits.

    Only for calls that may as well take effect later, or never.

    Args:
        seconds: How long a caller waits.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}

    def ask(self, call: Callable[[], T]) -> T:
        """The result of `call`.

        Raises:
            TimeoutError: It did not come in time, or an earlier one is overdue.
        """
        answer: Future[T] = Future()
        this = object()
        with self._lock:
            now = time.monotonic()
            if any(now - began > self._seconds for began in self._since.values()):
                raise TimeoutError("an earlier call has not been answered yet")
            self._since[this] = now

        def work() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._forget(this)

        try:
            threading.Thread(target=work, name="rag-blend-ask", daemon=True).start()
        except RuntimeError as error:
            self._forget(this)
            raise TimeoutError(f"no thread can be started: {error}") from error
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            if answer.done():  # it is what the call itself raised
                raise
            raise TimeoutError(f"no answer within {self._seconds} s") from None

    def _forget(self, this: object) -> None:
        with self._lock:
            self._since.pop(this, None)
