"""Entries that will be wanted soon are read from a farther tier before anybody asks."""

from __future__ import annotations

from collections.abc import Callable

from rag_blend.errors import ChunkNotFoundError
from rag_blend.storage._tiers.lane import Job
from rag_blend.storage.base import EntryReader


class FetchAhead(Job):
    """Reads an entry to its end; that keeps it in the nearer tiers (`_tiers.promote`).

    Args:
        key: The entry.
        open_entry: Opens it.
    """

    def __init__(self, key: str, open_entry: Callable[[str], EntryReader]) -> None:
        self.name = key
        self.size = 0
        self._open = open_entry

    def run(self) -> None:
        """See `Job.run`. Where it cannot be had, the query will find out for itself."""
        try:
            with self._open(self.name) as reader:
                reader.read(0, reader.size)
        except (OSError, ChunkNotFoundError):
            return
