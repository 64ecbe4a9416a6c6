"""The shadow check: some answered prompts are prefilled again, blended and in full, and compared in the background.

A calibration holds for prompts like those it was made with; this tells when they are no longer alike.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from rag_blend.divergence import agreement, kl
from rag_blend.errors import GenerationCancelledError
from rag_blend.runner import BlendPolicy

logger = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 64  # of an answer that are compared: more would keep the model for longer than a prefill
_MAX_WAITING = 4
_MIN_CHECKS = 8  # fewer are no reason to warn
_TOLERANCE = 2.0  # times the allowed KL: a mean over few other prompts is not exactly the calibration's
_POLL_S = 0.02


class ShadowQuery(NamedTuple):
    """An answered prompt.

    Attributes:
        ids: The prompt, int32.
        policy: How it was treated.
        answer_ids: The answer's tokens, at least one.
    """

    ids: np.ndarray
    policy: BlendPolicy
    answer_ids: list[int]


class DriftReport(NamedTuple):
    """How far answered prompts were from full prefill, over the tokens of the answers that were given.

    Attributes:
        num_checked: Prompts compared.
        num_dropped: Prompts sampled, but not compared: too many were waiting, or it failed.
        mean_kl: Mean KL(full || blended) over prompts, nats; NaN before the first check, like the next two.
        agreement: Mean share of positions with the same most likely token.
        worst_kl: The largest KL of one prompt.
        seconds: Time the model was busy with checks.
    """

    num_checked: int
    num_dropped: int
    mean_kl: float
    agreement: float
    worst_kl: float
    seconds: float


class ShadowChecker:
    """Samples answered prompts and has them compared in a daemon thread, which exists only while there is work.

    Args:
        share: Share of the offered prompts to compare, 0 to 1: at 0.1, every tenth.
        lock: Of the model. It is taken when it happens to be free, and given back between the two prefills.
        logits_of: Called with the lock held: prefills a query's prompt by the given policy and returns the logits
            along its answer, shape (num_tokens, vocab), or None when there is nothing to compare any more. When the
            event is set it raises `GenerationCancelledError` soon. It may fail otherwise, too.
        target: The largest mean KL and the smallest agreement that were asked for.

    Raises:
        ValueError: The share is out of its range.
    """

    def __init__(
        self,
        share: float,
        lock: threading.RLock,
        logits_of: Callable[[ShadowQuery, BlendPolicy, threading.Event], torch.Tensor | None],
        target: Callable[[], tuple[float, float]],
    ) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"shadow must lie between 0 and 1, got {share}")
        self._share = share
        self._model_lock = lock
        self._logits_of = logits_of
        self._target = target
        self._due = 0.0
        self._waiting: deque[ShadowQuery] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # never held while the model is at work
        self._total = DriftReport(0, 0, 0.0, 0.0, 0.0, 0.0)  # sums where the report has means
        self._warned = False

    def offer(self, query: ShadowQuery) -> None:
        """Take the prompt if it is its turn and there is room. Returns at once."""
        if not self._share:
            return
        with self._lock:
            self._due += self._share
            if self._due < 1.0 or self._stop.is_set():
                return
            self._due -= 1.0
            if len(self._waiting) >= _MAX_WAITING:
                self._add(num_dropped=1)
                return
            self._waiting.append(query)
            if self._thread is None:
                self._begin()

    def report(self) -> DriftReport:
        """What was found so far."""
        with self._lock:
            total = self._total
        if not total.num_checked:
            return total._replace(mean_kl=math.nan, agreement=math.nan, worst_kl=math.nan)
        return total._replace(mean_kl=total.mean_kl / total.num_checked, agreement=total.agreement / total.num_checked)

    def close(self) -> None:
        """Stop, before the next layer if a check is running, and wait until it has stopped."""
        with self._lock:
            self._stop.set()
            self._add(num_dropped=len(self._waiting))
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, name="rag-blend-shadow", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the answer is worth more than its check
            logger.warning("a shadow check could not begin: %s", error)
            self._waiting.clear()
            self._add(num_dropped=1)
        else:
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None  # whoever comes next starts another one
                    return
                query = self._waiting.popleft()
            try:
                checked = self._check(query)
            except GenerationCancelledError:
                checked = False
            except Exception as error:  # whatever it was, it must not end the thread or reach a caller
                logger.warning("a shadow check failed: %s", error)
                checked = False
            if not checked:
                with self._lock:
                    self._add(num_dropped=1)

    def _check(self, query: ShadowQuery) -> bool:
        blended = self._logits(query, query.policy)
        full = None if blended is None else self._logits(query, replace(query.policy, reuse=False))
        if blended is None or full is None:
            return False
        divergence = float(kl(full, blended).mean())
        with self._lock:
            self._add(num_checked=1, mean_kl=divergence, agreement=agreement(full, blended))
            self._total = self._total._replace(worst_kl=max(self._total.worst_kl, divergence))
        self._warn_once()
        return True

    def _logits(self, query: ShadowQuery, policy: BlendPolicy) -> torch.Tensor | None:
        while not self._model_lock.acquire(blocking=False):  # those who wait for it come first
            if self._stop.wait(_POLL_S):
                break
        else:
            started = time.perf_counter()
            try:
                return self._logits_of(query, policy, self._stop)
            finally:
                self._model_lock.release()
                with self._lock:
                    self._add(seconds=time.perf_counter() - started)
        raise GenerationCancelledError("the engine is being closed")

    def _add(self, **more: float) -> None:
        self._total = self._total._replace(**{name: getattr(self._total, name) + n for name, n in more.items()})

    def _warn_once(self) -> None:
        found = self.report()
        target_kl, target_agreement = self._target()
        drifted = found.mean_kl > _TOLERANCE * target_kl or found.agreement < target_agreement
        if drifted and found.num_checked >= _MIN_CHECKS and not self._warned:
            self._warned = True
            logger.warning(
                "blended answers have drifted from full prefill: over %d prompts, mean KL %.3g (%g is the target), "
                "agreement %.3g (%g); calibrate again, or raise recompute_ratio",
                found.num_checked, found.mean_kl, target_kl, found.agreement, target_agreement,
            )  # fmt: skip
