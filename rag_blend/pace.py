"""How long a prefill takes, learnt from those that were done: what a store may take at most is worth less than that."""

from __future__ import annotations

import threading

LONGEST_WAIT_S = 1.0  # for one call to a store
_SHORTEST_WAIT_S = 0.05  # or a first connection would never come about
_SHARE = 0.5  # of the time that computing the rows again would take
_WEIGHT = 0.3  # of the newest observation
_FEWEST_TOKENS = 64  # fewer say more about overhead than about tokens


class Pace:
    """A running estimate of the seconds that a prefill takes per token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_per_token: float | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in one prefill: so many tokens in so many seconds."""
        if tokens < _FEWEST_TOKENS or seconds <= 0:
            return
        new = seconds / tokens
        with self._lock:
            known = self._seconds_per_token
            self._seconds_per_token = new if known is None else known + _WEIGHT * (new - known)

    def seconds_for(self, tokens: int) -> float | None:
        """The time that prefilling so many tokens takes; None while nothing is known."""
        with self._lock:
            return None if self._seconds_per_token is None else self._seconds_per_token * tokens

    def wait_for(self, tokens: int) -> float:
        """Longest wait, in seconds, for a store that saves the prefill of so many tokens: half of that prefill."""
        worth = self.seconds_for(tokens)
        if worth is None:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, _SHARE * worth))
