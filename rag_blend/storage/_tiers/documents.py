"""Which document needs which entry, in several tiers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from rag_blend.storage._tiers.durable import DurableTiers
from rag_blend.storage._tiers.lives import Lives
from rag_blend.storage._tiers.marks import mark_of
from rag_blend.storage._tiers.tier import Everywhere, Tier
from rag_blend.storage._tiers.write_behind import Change
from rag_blend.storage.base import StorageBackend

T = TypeVar("T")


class Documents:
    """The tables of the durable tiers, as one.

    Args:
        durable: The tiers.
        lives: Those of the backend.
    """

    def __init__(self, durable: DurableTiers, lives: Lives) -> None:
        self._durable = durable
        self._lives = lives

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `TieredBackend.link`."""
        needed, mark = list(keys), mark_of("document", document)
        born = self._durable.marks_now(mark)
        life = self._lives.current(mark)
        change = Change(
            mark=mark,
            size=sum(map(len, needed)),
            apply=lambda backend: backend.link(document, needed),
            undo=lambda backend: backend.unlink({document}),
            must_arrive=True,
        )
        taker = self._durable.first_to_take(change)
        if needed:
            self._durable.send_to_others(change, born, life, taker)

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `TieredBackend.needed_only_by`."""
        tiers = self._durable.tiers
        found: set[str] = set()
        for tier in tiers:
            found.update(_asked(tier, lambda backend: backend.needed_only_by(documents)))
        if len(tiers) == 1:
            return sorted(found)
        others = [_asked(tier, lambda backend: backend.needed_by_others(documents, found)) for tier in tiers]
        return sorted(found.difference(*others))

    def listed(self) -> Iterator[tuple[str, list[str]]]:
        """See `TieredBackend.documents`."""
        needs: defaultdict[str, set[str]] = defaultdict(set)
        for tier in self._durable.tiers:
            try:
                for document, keys in tier.backend.documents():
                    needs[document].update(keys)
            except OSError:  # not a failure: it may know the documents by their digests only
                if tier is self._durable.home:
                    raise
        return ((document, sorted(keys)) for document, keys in needs.items())

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `TieredBackend.needed_by_others`."""
        asked = (
            _asked(tier, lambda backend: backend.needed_by_others(documents, keys)) for tier in self._durable.tiers
        )
        return set[str]().union(*asked)

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `TieredBackend.unlink`."""
        everywhere = Everywhere(f"unlinking {len(documents)} documents")
        marks = [mark_of("document", document) for document in documents]
        for mark in marks:
            self._lives.end(mark)
            self._durable.bury(mark, everywhere)
        for mark in marks:
            for far in self._durable.far:
                everywhere.do(far.tier, partial(far.wait_out, mark))
        for tier in reversed(self._durable.tiers):
            everywhere.do(tier, partial(tier.backend.unlink, documents))
        everywhere.finish()


def _asked(tier: Tier, question: Callable[[StorageBackend], T]) -> T:
    try:
        return question(tier.backend)
    except OSError as error:
        tier.failed(error)
        raise
