"""Tombstones: small records by which one process learns what another one has deleted.

A mark's content is random, and every deletion gives it a new one. So "the mark has changed since then" means "it was
deleted since then", without clocks and without counting; a mark is never taken away, so nothing that a medium carries
out late can make a deletion unseen.
"""

from __future__ import annotations

import hashlib
import json
import secrets

from rag_blend.storage.base import StorageBackend

_PREFIX = b"tombston".hex()  # no other record's name, which is a digest, begins like this


def mark_of(kind: str, name: str) -> str:
    """Name of the record that marks what has this name: 64 hex digits.

    Args:
        kind: ``entry``, ``record`` or ``document``.
        name: Its key or name.
    """
    return _PREFIX + hashlib.sha256(json.dumps(["tombstone", kind, name]).encode()).hexdigest()[len(_PREFIX) :]


def is_mark(name: str) -> bool:
    """Whether this is the name of a mark."""
    return name.startswith(_PREFIX)


def change_mark(backend: StorageBackend, mark: str) -> None:
    """Give a mark a content that it never had. Of several at once one wins, which is new to everybody as well.

    Raises:
        OSError: The medium does not answer.
    """
    backend.delete_record(mark)
    backend.put_record(mark, secrets.token_bytes(16))
