"""Several places as one: the nearest that has an entry serves it, and what is written reaches all of them.

    open_storage(["memory://?quota=2GB", "kv/", "redis://host/0"])      # nearest first

    write   the nearest durable tier, at once; memory tiers in front of it as well; the farther tiers later, by a thread
    open    the nearest tier that has the entry; read to its end, it is kept in the nearer tiers (`_tiers.promote`)
    delete  every tier, whatever is still under way (`_tiers.write_behind` says why nothing comes back)

A tier that fails is passed over and counted. It is an OSError only where the others cannot answer for it: when no other
has the entry, when something is deleted, when documents are asked for, and at the end of a listing.

Memory tiers in front of the first durable one hold copies of entries and nothing else: no records, no documents.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from rag_blend.errors import ChunkNotFoundError
from rag_blend.storage._tiers.documents import Documents
from rag_blend.storage._tiers.durable import DurableTiers
from rag_blend.storage._tiers.fetch_ahead import FetchAhead
from rag_blend.storage._tiers.lane import Lane
from rag_blend.storage._tiers.listing import labels_in, union_of
from rag_blend.storage._tiers.lives import Life, Lives
from rag_blend.storage._tiers.marks import mark_of
from rag_blend.storage._tiers.promote import Budget, Promotion, RememberingReader
from rag_blend.storage._tiers.records import Records
from rag_blend.storage._tiers.tier import Everywhere, Tier, named
from rag_blend.storage._tiers.write_behind import Change
from rag_blend.storage.base import Bytes, EntryReader, StorageBackend, StorageStats, checked_key

logger = logging.getLogger(__name__)


class TieredBackend(StorageBackend):
    """Backends, nearest first. They belong to this one: it closes them.

    "Home" is the nearest durable tier, or the nearest one if all are memory. What `write` has written lies there when
    it returns; if home refuses (a full disk), in the nearest tier behind it that takes it.

    A deletion reaches the tiers that this process has, not the disks of other machines: delete there as well. A memory
    tier of another process drops what is gone when it is next listed (`BlendEngine.refresh`).

    Args:
        tiers: The backends.
        write_behind_bytes: What may wait in memory for each of the tiers behind home; and, once more, what readers and
            promotions may keep. A writer waits for room as long as the queue moves. When it stands still, the entry
            does not go to that tier: that is counted (``dropped``) and reported, and it is safe at home.
        patience_s: For how long a full queue may stand still before entries are not queued any more.
        flush_s: How long `close` waits for what is queued.

    Raises:
        ValueError: There are no tiers.
    """

    def __init__(
        self,
        tiers: Sequence[StorageBackend],
        write_behind_bytes: int = 256 * 2**20,
        patience_s: float = 10.0,
        flush_s: float = 10.0,
    ) -> None:
        if not tiers:
            raise ValueError("no storage tiers are given")
        self.parallel_reads = max(tier.parallel_reads for tier in tiers)
        self.has_deadlines = all(tier.has_deadlines for tier in tiers)
        self._tiers = named(tiers)
        home = next((i for i, tier in enumerate(self._tiers) if tier.is_durable), 0)
        self._near = self._tiers[:home]
        self._durable = DurableTiers(self._tiers[home:], write_behind_bytes, patience_s)
        self._lives = Lives()
        self._records = Records(self._durable.tiers)
        self._documents = Documents(self._durable, self._lives)
        self._promotions = {tier: Lane(f"what is nearer than {tier.name}") for tier in self._tiers[1:]}
        self._ahead = Lane("what is wanted soon")
        self._budget = Budget(write_behind_bytes)
        self._counts: Counter[str] = Counter()
        self._flush_s = flush_s
        self._is_closed = False

    @classmethod
    def from_url(cls, rest: str) -> TieredBackend:
        """There is no such URL.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f'tiers are given as a list, as in ["memory://", "kv/"], not as tiered://{rest}')

    # --- entries ---

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`.

        Raises:
            OSError: No durable tier takes it.
        """
        data, label = bytes(data), bytes(label)  # a copy only if they can be changed
        change = Change(
            mark=mark_of("entry", checked_key(key)),
            size=len(data),
            apply=lambda backend: backend.write(key, data, label),
            undo=lambda backend: backend.delete(key),
        )
        born = self._durable.marks_now(change.mark)
        with self._lives.lock(key):
            life = self._lives.renewed(key)
            taker = self._durable.first_to_take(change)
            self._bring_nearer_up_to_date(taker, key, change)
        self._durable.send_to_others(change, born, life, taker)

    def place_of(self, key: str) -> str:
        """See `StorageBackend.place_of`: the nearest tier that has it, or the first server: asking that takes time."""
        for tier in self._tiers[:-1]:
            is_server = tier.backend.has_deadlines and tier.is_durable
            if is_server or key in tier.backend:
                return tier.name
        return self._tiers[-1].name

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`.

        Raises:
            OSError: No tier has it, and some tier does not answer.
        """
        life = self._lives.current(checked_key(key))  # before all else: a deletion from now on ends it
        unanswered: OSError | None = None
        for tier in self._tiers:
            try:
                reader = tier.backend.open(key)
            except ChunkNotFoundError:
                continue
            except OSError as error:
                tier.failed(error)
                unanswered = unanswered or error
                continue
            tier.count("hits")
            return self._remembering(reader, tier, key, life)
        if unanswered is not None:
            raise unanswered
        raise ChunkNotFoundError(key)

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`.

        Raises:
            OSError: Some tier does not answer; the others have deleted it. Call again to finish.
        """
        return self._remove(checked_key(key), "deleting", lambda backend: backend.delete(key), for_all_processes=True)

    def quarantine(self, key: str) -> None:
        """See `StorageBackend.quarantine`: in every tier, as it is not known where the damage came from.

        Raises:
            OSError: Some tier does not answer; it may still have the entry.
        """
        self._remove(checked_key(key), "setting aside", lambda backend: backend.quarantine(key))

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`; without those that only a tier knows which does not answer."""
        seen: set[str] = set()
        with contextlib.suppress(OSError):
            for key in union_of(self._durable.tiers, lambda backend: backend.keys()):
                seen.add(key)
                yield key
        for key, _ in self._only_near(seen):
            yield key

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """See `StorageBackend.labels`. An entry's label comes from the nearest tier that knows it.

        Raises:
            OSError: A tier does not answer; what the others have has been listed before.
        """
        seen: set[str] = set()
        unanswered: OSError | None = None
        try:
            for key, label in labels_in(self._durable.tiers):
                seen.add(key)
                yield key, label
        except OSError as error:
            unanswered = error
        yield from self._only_near(seen)
        if unanswered is not None:
            raise unanswered

    def stats(self) -> StorageStats:
        """See `StorageBackend.stats`. `entries` and `bytes` are those of the durable tier that holds most.

        Counts ``promoted``, ``not_promoted`` (no memory left to remember them), and the sums over all tiers of
        ``failed``, ``queued``, ``waiting``, ``dropped`` and ``withdrawn``. Each tier has these for itself in `tiers`,
        and ``hits``.
        """
        tiers = {tier.name: tier.stats() for tier in self._tiers}
        for far in self._durable.far:
            of_it = tiers[far.tier.name]
            tiers[far.tier.name] = replace(of_it, counts={**of_it.counts, **far.counts})
        largest = max((tiers[tier.name] for tier in self._durable.tiers), key=lambda held: held.bytes)
        counts = Counter(self._counts)
        for name in ("failed", "queued", "waiting", "dropped", "withdrawn"):
            counts[name] = sum(held.counts.get(name, 0) for held in tiers.values())
        return StorageStats(largest.entries, largest.bytes, largest.quota_bytes, dict(counts), tiers)

    def prefetch(self, keys: Iterable[str]) -> None:
        """See `StorageBackend.prefetch`: what the nearest tier has not got is read in the background."""
        nearest = self._tiers[0].backend
        for key in keys:
            if len(self._tiers) > 1 and key not in nearest:
                self._ahead.put(FetchAhead(key, self.open), waits=False)

    def limit_calls(self, seconds: float) -> None:
        """See `StorageBackend.limit_calls`."""
        for tier in self._tiers:
            tier.backend.limit_calls(seconds)

    # --- documents ---

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`. The farther tiers learn it later, but before they get what is written later.

        Raises:
            OSError: No durable tier takes it.
        """
        self._documents.link(document, keys)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`: what they need as one tier knows, and no other does as any tier knows.

        Raises:
            OSError: A tier does not answer.
        """
        return self._documents.needed_only_by(documents)

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `StorageBackend.needed_by_others`: as any tier knows.

        Raises:
            OSError: A tier does not answer.
        """
        return self._documents.needed_by_others(documents, keys)

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`.

        Raises:
            OSError: Some tier does not answer; the others have forgotten them. Call again to finish.
        """
        self._documents.unlink(documents)

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """See `StorageBackend.documents`: those that home knows, and those of the farther tiers that can list them.

        Raises:
            OSError: Home cannot list them.
        """
        return self._documents.listed()

    # --- records ---

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`: the farthest tier that answers decides (`_tiers.records`).

        Raises:
            OSError: Some tier does not answer, and no other has it.
        """
        return self._records.get(name)

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`.

        Raises:
            OSError: A tier does not answer; what the others have has been listed before.
        """
        return self._records.names()

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`: the farthest tier that answers decides who was first.

        Raises:
            OSError: No durable tier takes it.
        """
        self._records.put(name, data)

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`.

        Raises:
            OSError: Some tier does not answer; the others have deleted it. Call again to finish.
        """
        self._records.delete(name)

    # --- what is under way ---

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all tiers have what they shall have.

        Args:
            timeout: For so many seconds; None: as long as it takes.

        Returns:
            Whether they have it now.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        lanes = [self._ahead, *self._promotions.values(), *(far.lane for far in self._durable.far)]
        return all([lane.flush(None if give_up is None else max(0.0, give_up - time.monotonic())) for lane in lanes])

    def close(self) -> None:
        """See `StorageBackend.close`. Waits `flush_s` for what is queued; what is left then is dropped and reported.

        A tier that is in the middle of a call which does not return stays open.
        """
        if self._is_closed:
            return
        self._is_closed = True
        reads_ahead = not self._ahead.close()
        self.flush(self._flush_s)
        busy = set(self._tiers[1:]) if reads_ahead else set()
        busy |= {tier for tier, lane in self._promotions.items() if not lane.close()}
        busy |= {far.tier for far in self._durable.far if not far.lane.close()}
        with contextlib.ExitStack() as closing:  # each is closed, whatever the others raise
            for tier in self._tiers:
                if tier in busy:
                    logger.warning("storage tier %s does not answer, so it is not closed", tier.name)
                else:
                    closing.callback(tier.backend.close)

    def _bring_nearer_up_to_date(self, taker: Tier, key: str, change: Change) -> None:
        """Memory gets what was written; a tier that refused it must not go on serving what it had before."""
        refusing = self._tiers[len(self._near) : self._tiers.index(taker)]
        for tier in refusing:
            with tier.tolerated():
                tier.backend.delete(key)
        for tier in self._near:
            with tier.tolerated():
                tier.backend.delete(key)
                change.apply(tier.backend)

    def _remembering(self, reader: EntryReader, tier: Tier, key: str, life: Life) -> EntryReader:
        if tier is self._tiers[0]:
            return reader
        if not self._budget.take(reader.size):
            self._counts["not_promoted"] += 1
            return reader
        return RememberingReader(reader, self._budget, partial(self._promote, tier, key, life))

    def _promote(self, source: Tier, key: str, life: Life, pieces: list[Bytes]) -> None:
        nearer = self._tiers[: self._tiers.index(source)]
        promotion = Promotion(key, pieces, source, nearer, life, self._lives.lock(key), self._promoted)
        self._promotions[source].put(promotion, waits=False)

    def _promoted(self, size: int, is_taken: bool) -> None:
        self._budget.give_back(size)
        self._counts["promoted"] += is_taken

    def _remove(
        self, key: str, what: str, act: Callable[[StorageBackend], object], for_all_processes: bool = False
    ) -> bool:
        """Delete or set aside, from the farthest tier to the nearest, for which `_tiers.promote` has the reason."""
        mark, everywhere = mark_of("entry", key), Everywhere(f"{what} entry {key[:12]}")
        with self._lives.lock(key):  # a promotion that is just being written is done then
            self._lives.end(key)
        if for_all_processes:
            self._durable.bury(mark, everywhere)
        found = self._durable.remove(mark, everywhere, act)
        with self._lives.lock(key):
            for tier in (self._durable.home, *reversed(self._near)):
                found |= bool(everywhere.do(tier, partial(act, tier.backend)))
        everywhere.finish()
        return found

    def _only_near(self, durable: AbstractSet[str]) -> Iterator[tuple[str, bytes]]:
        """Entries of memory tiers that no other has listed, without those that are gone everywhere else."""
        for tier in self._near:
            for key, label in tier.backend.labels():
                if key not in durable and not self._is_gone(key):
                    yield key, label

    def _is_gone(self, key: str) -> bool:
        """Whether no durable tier has it: another process has deleted it. Then the memory tiers drop it as well."""
        try:
            if any(key in tier.backend for tier in self._durable.tiers):
                return False
        except OSError:
            return False  # nobody knows
        for tier in self._near:
            tier.backend.delete(key)
        return True
