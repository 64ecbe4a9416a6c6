"""The durable tiers: home, which is written at once, and the farther ones, which are written later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rag_blend.storage._tiers.lives import Life
from rag_blend.storage._tiers.tier import Everywhere, Tier
from rag_blend.storage._tiers.write_behind import Change, FarTier
from rag_blend.storage.base import StorageBackend


class DurableTiers:
    """Tiers that hold something together.

    Args:
        tiers: Nearest first; the first is home.
        capacity: Bytes that may wait for each of the others.
        patience_s: See `Lane`.
    """

    def __init__(self, tiers: Sequence[Tier], capacity: int, patience_s: float) -> None:
        self.tiers = tiers
        self.home = tiers[0]
        self.far = [FarTier(tier, capacity, patience_s) for tier in tiers[1:]]

    def marks_now(self, mark: str) -> list[bytes | None]:
        """What a mark is in each far tier. To be asked before a change is made: a later deletion then shows."""
        return [far.mark_now(mark) for far in self.far]

    def first_to_take(self, change: Change) -> Tier:
        """Write to home or, if it refuses, to the nearest tier behind it that does not; returns which it was.

        Raises:
            OSError: They all refuse: what home says.
        """
        refused: list[OSError] = []
        for i, tier in enumerate(self.tiers):
            try:
                if i:
                    self.far[i - 1].write(change)
                else:
                    change.apply(tier.backend)
            except OSError as error:
                tier.failed(error)
                refused.append(error)
            else:
                return tier
        raise refused[0]

    def send_to_others(self, change: Change, born: Sequence[bytes | None], life: Life, taker: Tier) -> None:
        """Queue it for the far tiers but the one that has taken it.

        Args:
            change: What is to be written.
            born: What `marks_now` was.
            life: Ends when it is undone.
            taker: What `first_to_take` returned.
        """
        for far, was in zip(self.far, born, strict=True):
            if far.tier is not taker:
                far.send(change, was, life)

    def bury(self, mark: str, everywhere: Everywhere) -> None:
        """Withdraw what is under way, in all processes; to be done before anything is deleted."""
        for far in self.far:
            everywhere.do(far.tier, partial(far.bury, mark))

    def remove(self, mark: str, everywhere: Everywhere, act: Callable[[StorageBackend], object]) -> bool:
        """Do `act` in all far tiers, the farthest first; returns whether it was true in one of them."""
        found = False
        for far in reversed(self.far):
            everywhere.do(far.tier, partial(far.wait_out, mark))
            found |= bool(everywhere.do(far.tier, partial(act, far.tier.backend)))
        return found
