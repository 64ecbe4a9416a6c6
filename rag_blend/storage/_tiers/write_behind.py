"""What is written into a farther tier later, by a thread, and how a deletion can never be undone by it.

In what follows T is a far tier, K a key, and "the mark" the record of T that says that K was deleted (`marks`).

    write(K)   reads the mark, then stores K in the nearest durable tier, then queues a copy for T.
    delete(K)  changes the mark of T, then deletes K from T, then from the nearer tiers.
    the copy   1. is the mark what it was?  if not, it is withdrawn.
               2. write K into T.
               3. is the mark still what it was?  if not, delete K from T again.

Let a deletion begin after the write of this copy returned, in whatever process. It changes the mark at time m and
deletes from T at time d > m. The copy writes at time w and looks again at time c > w. If w < d, the deletion takes the
copy away. If w > d, then m < d < w < c, so step 3 sees the change and takes it away. There is no third case, and no
clock is compared: both orders are those in which one process made its own calls.

It holds as well when a call of the copy fails: what may have been written is not given up before step 3 or its deletion
has succeeded (`Job.must_finish`). Within a process the life of a key (`lives`) is checked in the same two places, so a
copy is withdrawn also when the mark could not be changed. A copy whose key was written anew by its own process is not
written any more, but what it has written only goes if the key was deleted.

What is lost instead, in the favour of erasing:

- A mark that could not be read in time when K was written counts as none. If it turns out that there is one, nobody
  knows which came first, and the copy is withdrawn.
- If K is deleted and written anew by other processes, all between w and the end of step 3, step 3 may take their new
  copy away from T. It stays where they have written it first.

What no order of calls can prevent: a process that is killed between steps 2 and 3 leaves K in T if K was deleted in
just that moment; deleting K again removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rag_blend.storage._fork import repair_after_fork
from rag_blend.storage._tiers.bounded import BoundedCalls
from rag_blend.storage._tiers.lane import Job, Lane
from rag_blend.storage._tiers.lives import Life
from rag_blend.storage._tiers.marks import change_mark
from rag_blend.storage._tiers.tier import Tier
from rag_blend.storage.base import StorageBackend

_MARK_SECONDS = 0.25  # how long a writer waits for the mark of a tier that may hang
_OWN_WRITE_SECONDS = 60.0  # how long a deletion waits for a write of this process to the same tier and key


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is to be written to several tiers.

    Attributes:
        mark: Name of the mark that says that it was deleted.
        size: Bytes that it keeps in memory.
        apply: Writes it.
        undo: Takes it away.
        must_arrive: It is small and never turned away, nor given up because it is refused.
    """

    mark: str
    size: int
    apply: Callable[[StorageBackend], object]
    undo: Callable[[StorageBackend], object]
    must_arrive: bool = False


class Copy(Job):
    """A change on its way into a far tier.

    Args:
        change: The change.
        tier: Where it goes.
        born: What the mark was when it was made, None if there was none or nobody knows.
        life: Ends when it is undone or made anew in this process.
        withdrawn: Called when it was not written, or taken away, because it was undone meanwhile.
    """

    def __init__(
        self, change: Change, tier: StorageBackend, born: bytes | None, life: Life, withdrawn: Callable[[], None]
    ) -> None:
        self.name = change.mark
        self.size = change.size
        self.is_patient = change.must_arrive
        self._change = change
        self._tier = tier
        self._born = born
        self._life = life
        self._withdrawn = withdrawn

    def run(self) -> None:
        """See `Job.run`, and the three steps above. `must_finish` says whether it may have been written."""
        refused: OSError | None = None
        is_unwanted = self._life.is_over or self._was_deleted()
        if not is_unwanted:
            try:
                self._change.apply(self._tier)
                self.must_finish = True
            except (TimeoutError, ConnectionError):
                self.must_finish = True  # it may take effect yet
                raise
            except OSError as error:
                refused = error
        if self.must_finish:
            if self._was_deleted():
                self._change.undo(self._tier)
                is_unwanted = True
            self.must_finish = False
        if is_unwanted:
            self._withdrawn()
        elif refused is not None:
            raise refused

    def _was_deleted(self) -> bool:
        return self._life.is_deleted or self._tier.get_record(self.name) != self._born


class FarTier:
    """A tier that is written behind the caller's back.

    Args:
        tier: The tier.
        capacity: Bytes that may wait for it.
        patience_s: See `Lane`.
    """

    def __init__(self, tier: Tier, capacity: int, patience_s: float) -> None:
        self.tier = tier
        self.lane = Lane(f"storage tier {tier.name}", capacity, patience_s)
        self._withdrawn = 0
        self.after_fork()
        repair_after_fork(self)

    def after_fork(self) -> None:
        """See `Forkable`."""
        self._bounded = BoundedCalls(_MARK_SECONDS)

    @property
    def counts(self) -> Mapping[str, int]:
        """Those of the lane, and ``withdrawn``: not written because it was deleted or written anew meanwhile."""
        return {**self.lane.counts, "withdrawn": self._withdrawn}

    def mark_now(self, mark: str) -> bytes | None:
        """What a mark is; None also if the tier does not tell at once."""
        if self.lane.is_away:
            return None
        try:
            return self._bounded.ask(lambda: self.tier.backend.get_record(mark))
        except OSError as error:
            self.tier.failed(error)
            return None

    def send(self, change: Change, born: bytes | None, life: Life) -> None:
        """Queue a copy; see `Copy`."""
        copy = Copy(change, self.tier.backend, born, life, self._withdraw)
        self.lane.put(copy, waits=not change.must_arrive)

    def bury(self, mark: str) -> None:
        """Withdraw all copies under way, those of other processes as well.

        Raises:
            OSError: The tier does not answer.
        """
        change_mark(self.tier.backend, mark)

    def wait_out(self, mark: str) -> None:
        """Wait for a copy that this process is just writing; its life must have ended.

        Raises:
            TimeoutError: It takes too long.
        """
        self.lane.wait_out(mark, _OWN_WRITE_SECONDS)

    def write(self, change: Change) -> None:
        """Write a change at once. An older copy, whose life must have ended, does not take it away any more.

        Raises:
            OSError: The tier refuses.
        """
        self.lane.wait_out(change.mark, _OWN_WRITE_SECONDS, and_release=True)
        change.apply(self.tier.backend)

    def _withdraw(self) -> None:
        self._withdrawn += 1
