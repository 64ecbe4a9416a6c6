"""Ingest when nobody is asking: texts met for the first time are cached after the answer, not before it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

logger = logging.getLogger(__name__)

_QUIET_S = 0.5  # the model has been idle for so long; between retrieval and the question goes less
_POLL_S = 0.05
_AT_ONCE = 16  # texts; whoever asks meanwhile waits for one batch of them at most


class PendingText(NamedTuple):
    """A text to ingest; see `BlendEngine.ingest`. `head` is in token ids."""

    text: str
    head: tuple[int, ...] | None
    document: str


class IdleIngester:
    """A queue of texts and a daemon thread that works it off, some texts at a time, while the model is idle.

    The thread exists only while there is work.

    Args:
        ingest: Ingests texts that have one head. Whatever it raises is logged, and the texts dropped.
        idle_s: For how long, in seconds, the model has been idle; 0 while it is used.
        max_texts: How many texts may wait; more are dropped.
    """

    def __init__(
        self, ingest: Callable[[Sequence[PendingText]], object], idle_s: Callable[[], float], max_texts: int = 1024
    ) -> None:
        self._ingest = ingest
        self._idle_s = idle_s
        self._max_texts = max_texts
        self._waiting: deque[PendingText] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, texts: Sequence[PendingText]) -> int:
        """Queue texts that do not wait already. Returns at once.

        Returns:
            How many of them wait now, and were not dropped.
        """
        with self._changed:
            if self._stop.is_set():
                return 0
            room = self._max_texts - len(self._waiting)
            known = set(self._waiting)
            new = [text for text in dict.fromkeys(texts) if text not in known]
            self._waiting.extend(new[:room])
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-blend-later", daemon=True)
                self._thread.start()
            return len(set(texts)) - len(new[room:])

    def drop(self, documents: AbstractSet[str]) -> None:
        """Forget the waiting texts of these documents."""
        with self._changed:
            self._waiting = deque(text for text in self._waiting if text.document not in documents)
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until nothing waits; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self) -> None:
        """Drop what waits, and wait for the text that is being ingested."""
        with self._changed:
            self._stop.set()
            self._waiting.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            quiet = self._wait_for_quiet()
            with self._changed:
                if not quiet or not self._waiting:
                    self._busy, self._thread = False, None
                    self._changed.notify_all()
                    return
                texts = self._next()
                self._busy = True
            try:
                self._ingest(texts)
            except Exception as error:  # nobody asked for it, so nobody is told but the log
                logger.warning("%d texts met at retrieval could not be cached: %s", len(texts), error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> list[PendingText]:
        texts = [self._waiting.popleft()]
        while self._waiting and len(texts) < _AT_ONCE and self._waiting[0].head == texts[0].head:
            texts.append(self._waiting.popleft())
        return texts

    def _wait_for_quiet(self) -> bool:
        """False when it is over meanwhile."""
        while not self._stop.is_set():
            if self._idle_s() >= _QUIET_S or not self._waiting:
                return True
            self._stop.wait(_POLL_S)
        return False


class IdleClock:
    """For how long a model has been idle. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._since = time.monotonic()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            self._since = time.monotonic()

    def touch(self) -> None:
        """Somebody will use the model soon."""
        with self._lock:
            self._since = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last use; 0 during one."""
        with self._lock:
            return 0.0 if self._users else time.monotonic() - self._since
