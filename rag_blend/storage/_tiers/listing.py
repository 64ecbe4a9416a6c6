"""What several tiers have, each thing once. The OSError of a tier comes when the others have been listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rag_blend.storage._tiers.tier import Tier
from rag_blend.storage.base import StorageBackend


def union_of(tiers: Sequence[Tier], names_in: Callable[[StorageBackend], Iterator[str]]) -> Iterator[str]:
    """All names.

    Args:
        tiers: Where to look.
        names_in: Lists one backend.

    Raises:
        OSError: Some tier does not answer.
    """
    seen: set[str] = set()
    unanswered: OSError | None = None
    for tier in tiers:
        try:
            for name in names_in(tier.backend):
                if name not in seen:
                    seen.add(name)
                    yield name
        except OSError as error:
            tier.failed(error)
            unanswered = unanswered or error
    if unanswered is not None:
        raise unanswered


def labels_in(tiers: Sequence[Tier]) -> Iterator[tuple[str, bytes]]:
    """All keys, each with the first label that some tier knows, b"" if none does.

    Raises:
        OSError: Some tier does not answer.
    """
    told: set[str] = set()
    without: set[str] = set()
    unanswered: OSError | None = None
    for tier in tiers:
        try:
            for key, label in tier.backend.labels():
                if label and key not in told:
                    told.add(key)
                    yield key, label
                elif not label:
                    without.add(key)
        except OSError as error:
            tier.failed(error)
            unanswered = unanswered or error
    for key in without - told:
        yield key, b""
    if unanswered is not None:
        raise unanswered
