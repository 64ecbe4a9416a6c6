"""Which heads chunks were cached behind, so that a prompt with another one is noticed."""

import threading
from collections.abc import Sequence


class KnownHeads:
    """The heads that this process has cached chunks behind. Thread-safe."""

    def __init__(self) -> None:
        """Start with none."""
        self._heads: set[tuple[int, ...]] = set()
        self._told = False
        self._lock = threading.Lock()

    def add(self, head: Sequence[int]) -> None:
        """Chunks are cached behind this head."""
        with self._lock:
            if tuple(head) not in self._heads:
                self._heads.add(tuple(head))
                self._told = False

    def __contains__(self, head: object) -> bool:
        """Tell whether chunks were cached behind this head, a tuple of ids."""
        with self._lock:
            return head in self._heads

    def begin(self, prompt: Sequence[int]) -> bool:
        """Tell whether one of them is the beginning of a prompt."""
        with self._lock:
            return any(tuple(prompt[: len(head)]) == head for head in self._heads)

    def tell_once(self) -> bool:
        """Tell whether nobody has been told of a foreign head since the last one was added, and note that now."""
        with self._lock:
            told, self._told = self._told, True
            return not told
