"""A backend among others: its name, and what happened with it in this process."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rag_blend.storage.base import StorageBackend, StorageStats

logger = logging.getLogger(__name__)


class Tier:
    """A backend and its counters: ``hits`` (entries opened here), ``failed`` (calls that raised an OSError).

    Args:
        name: In statistics and messages.
        backend: The backend.
    """

    def __init__(self, name: str, backend: StorageBackend) -> None:
        self.name = name
        self.backend = backend
        self.is_durable: bool = backend.durable
        self._counts: Counter[str] = Counter()  # a lost update of a counter is no reason for a lock

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what happened."""
        return dict(self._counts)

    def count(self, what: str) -> None:
        """Something happened."""
        self._counts[what] += 1

    def failed(self, error: OSError) -> None:
        """Count a call that was refused or not answered; the first one is reported."""
        level = logging.DEBUG if self._counts["failed"] else logging.WARNING
        self.count("failed")
        logger.log(level, "storage tier %s failed, the others go on: %s", self.name, error)

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Count an OSError of the body instead of raising it."""
        try:
            yield
        except OSError as error:
            self.failed(error)

    def stats(self) -> StorageStats:
        """What the backend holds, and the counters; zeros when it does not answer."""
        held = StorageStats(0, 0, counts=getattr(self.backend, "counts", {}))
        with self.tolerated():
            held = self.backend.stats()
        return replace(held, counts={**held.counts, **self.counts})


def named(backends: Sequence[StorageBackend]) -> tuple[Tier, ...]:
    """Tiers with the names ``memory``, ``disk``, ``disk 2``, …, after the backends' classes."""
    seen: Counter[str] = Counter()
    tiers = []
    for backend in backends:
        name = type(backend).__name__.removesuffix("Backend").lower()
        seen[name] += 1
        tiers.append(Tier(name if seen[name] == 1 else f"{name} {seen[name]}", backend))
    return tuple(tiers)


class Everywhere:
    """Does something in every tier, even if some of them fail, and tells in the end which did.

    Args:
        what: What is done, for the error: ``deleting abc``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._errors: list[tuple[Tier, OSError]] = []

    def do(self, tier: Tier, act: Callable[[], object]) -> object:
        """Do it in one tier; returns its result, None if the tier failed."""
        try:
            return act()
        except OSError as error:
            tier.failed(error)
            self._errors.append((tier, error))
            return None

    def finish(self) -> None:
        """Raise unless all went well.

        Raises:
            OSError: Some tier failed.
        """
        if self._errors:
            reasons = "; ".join(f"{tier.name}: {error}" for tier, error in self._errors)
            raise OSError(f"{self._what} is not finished, call again to finish: {reasons}") from self._errors[0][1]
