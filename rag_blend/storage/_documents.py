"""Which document needs which entry."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from rag_blend.storage._database import Database
from rag_blend.storage._files import set_aside

logger = logging.getLogger(__name__)


class DocumentTable(Database):
    """document -> keys. Nothing else knows them: what is written here is synced, and damage is kept and reported."""

    def link(self, document: str, keys: Iterable[str]) -> None:
        """Record that `document` needs the entries `keys`."""
        rows = [(document, key) for key in keys]
        self.run("BEGIN IMMEDIATE", lambda db: db.executemany("INSERT OR IGNORE INTO needs VALUES (?, ?)", rows))

    def unlink(self, documents: AbstractSet[str]) -> None:
        """Forget what these documents need."""
        rows = [(document,) for document in documents]
        if self.path.exists():
            self.run("BEGIN IMMEDIATE", lambda db: db.executemany("DELETE FROM needs WHERE document = ?", rows))

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """The keys that these documents need and no other does, sorted."""
        return self.run("BEGIN", lambda db: _needed_only_by(db, documents)) if self.path.exists() else []

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """Those of `keys` that some document which is not among `documents` needs."""
        query = "SELECT document FROM needs WHERE key = ?"

        def work(db: sqlite3.Connection) -> set[str]:
            return {key for key in keys if any(other not in documents for (other,) in db.execute(query, (key,)))}

        return self.run("BEGIN", work) if self.path.exists() else set()

    def all(self) -> list[tuple[str, list[str]]]:
        """All documents with the keys they need."""
        needs: dict[str, list[str]] = {}
        if self.path.exists():
            rows = self.run(
                "BEGIN", lambda db: list(db.execute("SELECT document, key FROM needs ORDER BY document, key"))
            )
            for document, key in rows:
                needs.setdefault(document, []).append(key)
        return list(needs.items())

    def prepare(self, db: sqlite3.Connection) -> None:
        """See `Database.prepare`."""
        db.execute("CREATE TABLE IF NOT EXISTS needs (document TEXT, key TEXT, PRIMARY KEY (document, key))")
        db.execute("CREATE INDEX IF NOT EXISTS needs_key ON needs (key)")

    def discard(self, path: Path) -> None:
        """See `Database.discard`."""
        set_aside(path)
        if path == self.path:
            logger.warning(
                "the table of documents, %s, is damaged and set aside: documents that were stored before cannot be "
                "forgotten by id until they are ingested again", path,
            )  # fmt: skip


def _needed_only_by(db: sqlite3.Connection, documents: AbstractSet[str]) -> list[str]:
    theirs: set[str] = set()
    for document in documents:
        theirs.update(key for (key,) in db.execute("SELECT key FROM needs WHERE document = ?", (document,)))
    return sorted(
        key
        for key in theirs
        if all(document in documents for (document,) in db.execute("SELECT document FROM needs WHERE key = ?", (key,)))
    )
