"""Small records in several tiers that have to agree.

The farthest tier that answers decides, since all machines share it; the nearer ones have copies, for when it is away.
If it has lost a record (it was emptied, or evicts), a copy restores it. If the record was deleted there by another
machine, its mark (`marks`) says so, and the copy goes: a text that was forgotten must not come back from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rag_blend.storage._tiers.listing import union_of
from rag_blend.storage._tiers.marks import change_mark, is_mark, mark_of
from rag_blend.storage._tiers.tier import Everywhere, Tier
from rag_blend.storage.base import checked_key


class Records:
    """The records of some tiers.

    Args:
        tiers: Nearest first. Marks are kept in all but the first.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def get(self, name: str) -> bytes | None:
        """A record, or None.

        Raises:
            OSError: Some tier does not answer, and no other has it.
        """
        checked_key(name)
        without: list[Tier] = []
        unanswered: OSError | None = None
        for i, tier in reversed(list(enumerate(self._tiers))):
            try:
                data = tier.backend.get_record(name)
            except OSError as error:
                tier.failed(error)
                unanswered = unanswered or error
                continue
            if data is not None:
                data = self._restored(name, data, without)
                self._copy(name, data, self._tiers[: i + 1])
            if data is not None:
                return data
            without.append(tier)
        if unanswered is not None:
            raise unanswered
        return None

    def put(self, name: str, data: bytes) -> None:
        """Write a record unless there is one.

        Raises:
            OSError: No tier takes it.
        """
        checked_key(name)
        if self._is_there(name):
            return
        for tier in self._tiers[1:]:
            with tier.tolerated():
                tier.backend.delete_record(mark_of("record", name))
        refused: OSError | None = None
        for i, tier in reversed(list(enumerate(self._tiers))):
            try:
                tier.backend.put_record(name, data)
                winner = tier.backend.get_record(name)
            except OSError as error:
                tier.failed(error)
                refused = error
                continue
            self._copy(name, data if winner is None else winner, self._tiers[:i])
            return
        if refused is not None:
            raise refused

    def delete(self, name: str) -> None:
        """Delete a record everywhere.

        Raises:
            OSError: Some tier does not answer; the others have deleted it.
        """
        checked_key(name)
        everywhere = Everywhere(f"deleting record {name[:12]}")
        for tier in self._tiers[1:]:
            everywhere.do(tier, partial(change_mark, tier.backend, mark_of("record", name)))
        for tier in reversed(self._tiers):
            everywhere.do(tier, partial(tier.backend.delete_record, name))
        everywhere.finish()

    def names(self) -> Iterator[str]:
        """The names of all records.

        Raises:
            OSError: Some tier does not answer; what the others have has been listed before.
        """
        return (name for name in union_of(self._tiers, lambda backend: backend.records()) if not is_mark(name))

    def _is_there(self, name: str) -> bool:
        try:
            return self.get(name) is not None
        except OSError:
            return False  # the tiers that do not answer have no say

    def _restored(self, name: str, data: bytes, without: Sequence[Tier]) -> bytes | None:
        """What a record is once the farther tiers, which have none, have been asked why."""
        for tier in without:
            if not self._was_deleted(name, tier):
                with tier.tolerated():
                    tier.backend.put_record(name, data)
                    data = tier.backend.get_record(name) or data  # another machine may have been first
            if self._was_deleted(name, tier):  # asked after the write: a deletion is seen here, or comes later
                with tier.tolerated():
                    tier.backend.delete_record(name)
                return None
        return data

    def _was_deleted(self, name: str, tier: Tier) -> bool:
        try:
            return tier.backend.get_record(mark_of("record", name)) is not None
        except OSError as error:
            tier.failed(error)
            raise

    def _copy(self, name: str, data: bytes | None, nearer: Sequence[Tier]) -> None:
        for tier in nearer:
            with tier.tolerated():
                there = tier.backend.get_record(name)
                if there is not None and there != data:
                    tier.backend.delete_record(name)
                if data is not None and there != data:
                    tier.backend.put_record(name, data)
