"""What backends on a server have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rag_blend.storage._guard import Guard
from rag_blend.storage.base import StorageBackend


class GuardedBackend(StorageBackend):
    """A backend all of whose calls go through a guard."""

    has_deadlines = True
    _guard: Guard[Any]

    @property
    def counts(self) -> Mapping[str, int]:
        """`StorageStats.counts`, which can be had when the server does not answer.

        Calls: ``timeouts``, ``failures``, ``denied``, ``refused`` (not made); pauses: ``opened``.
        """
        return self._guard.counts

    def limit_calls(self, seconds: float) -> None:
        """See `StorageBackend.limit_calls`. Never more than `deadline_s`; writing has a deadline of its own."""
        self._guard.limit(seconds)
