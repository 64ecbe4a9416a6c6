"""What the files of a directory say, where that can be read at once, with labels and the order of use.

The files are the truth. A row is true as long as size and time of change are those of its file; `update` makes rows
true again, whatever happened to the files, so nobody has to tell what happened. Lost or damaged, the index is made
from the files.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from rag_blend.storage._database import Database, transaction
from rag_blend.storage._files import remove
from rag_blend.storage._layout import Facts, Kind, Layout, entry_of, kind_of

logger = logging.getLogger(__name__)

_VERSION = 1
_TABLES = """
    DROP TABLE IF EXISTS files;
    DROP TABLE IF EXISTS labels;
    CREATE TABLE files (name TEXT PRIMARY KEY, kind TEXT, size INTEGER, mtime_ns INTEGER, used INTEGER) WITHOUT ROWID;
    CREATE INDEX files_used ON files (used);
    CREATE TABLE labels (name TEXT PRIMARY KEY, label BLOB);
"""
_PUT = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)"

# Damaged ones first. To make an entry again costs a fixed part and one in proportion to its size, taken as equal for an
# entry of average size. What costs least, per byte that it takes up and per use of others since its own, goes first:
# among entries that are alike the one not used for longest, and a large one up to twice as soon as an average one.
_LEAST_WANTED_FIRST = """
    SELECT name, size FROM files WHERE kind != 'temp'
    ORDER BY kind = 'entry', (:clock - used) * size / (size + :average) DESC, used LIMIT :number
"""
_TOO_OLD_EVIDENCE = "SELECT name FROM files WHERE kind = 'bad' ORDER BY used DESC LIMIT -1 OFFSET 16"
_WRITE_USES_AT = 256
_REMEMBERED_USES = 4096
_LABELS_AT_ONCE = 500
_RANKED_AT_ONCE = 64
_NOTHING = Facts(0, 0)


class Reserved(NamedTuple):
    """What `FileIndex.reserve` did.

    Attributes:
        missing: Bytes by which there is still too little room; 0 if there is room.
        evicted: How many entries went.
    """

    missing: int
    evicted: int


class FileIndex(Database):
    """Size, label and last use of every file of `layout`, shared by all processes.

    Args:
        layout: The files.
    """

    # Whatever SQLite cannot make sense of is made anew.
    damage = Database.damage | {sqlite3.SQLITE_ERROR}

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.directory / "index.sqlite")
        self._layout = layout
        self._uses: deque[str] = deque(maxlen=_REMEMBERED_USES)

    def used(self, name: str) -> None:
        """Remember that an entry was read. Costs no transaction but now and then, never waits and never fails."""
        self._uses.append(name)
        if len(self._uses) >= _WRITE_USES_AT:
            self.write_uses(patience=0.0)

    def write_uses(self, patience: float) -> None:
        """Write down what was used; if that is not possible now, not all of it is kept."""
        if self._uses and self.path.exists():
            with contextlib.suppress(OSError):
                self.run("BEGIN IMMEDIATE", self._write_uses, patience)

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """All labels, each with its name; one that is written meanwhile may come twice."""
        # As they lie in the file. Sorted by name they would cost a page of it each, ten times as long for many.
        latest = 0
        while some := self._labels_behind(latest):
            yield from ((name, label) for _, name, label in some)
            latest = some[-1][0]

    def update(
        self, names: Collection[str], labels: Mapping[str, bytes] | None = None, patience: float | None = None
    ) -> None:
        """Make the rows of these files say what is there now.

        Args:
            names: The files, whatever happened to them.
            labels: Labels of those that were just written.
            patience: Seconds to wait for others, if not as usual.
        """
        if (names and self.path.exists()) or any(map(self._layout.look, names)):
            self.run("BEGIN IMMEDIATE", lambda db: self._update(db, names, labels or {}), patience)

    def differing(self, found: Mapping[str, Facts | None]) -> set[str]:
        """Of what `Layout.scan` found and of what there are rows of, the names whose row is not true."""
        rows = self._rows() if found or self.path.exists() else {}
        wrong = {name for name in found.keys() | rows.keys() if found.get(name) != rows.get(name)}
        growing = {name for name in wrong if name in found and name in rows and kind_of(name) is Kind.TEMP}
        return wrong - growing

    def reserve(self, temp: str, size: int, replaced: str, quota: int, spared: AbstractSet[str]) -> Reserved:
        """Count `size` bytes for a file that is to be written, and remove others until all together fit the quota.

        Args:
            temp: The name the file has until it is whole; its row goes with it.
            size: How large it will be, in bytes.
            replaced: The name it will get; what has it now is neither counted nor removed.
            quota: What all files may take up, in bytes.
            spared: Names of files not to be removed.
        """

        def work(db: sqlite3.Connection) -> Reserved:
            self._write_uses(db)
            made = self._make_room(db, size, replaced, quota, spared)
            if not made.missing:
                db.execute(_PUT, (temp, Kind.TEMP, size, 0, 0))
            return made

        return self.run("BEGIN IMMEDIATE", work)

    def release(self, temp: str) -> None:
        """Count a file no longer that was not written after all."""
        self.run("BEGIN IMMEDIATE", lambda db: _forget(db, temp))

    def prepare(self, db: sqlite3.Connection) -> None:
        """See `Database.prepare`."""
        db.execute("PRAGMA page_size = 16384")  # two labels of 2 KB do not fit into the usual 4096
        db.execute("PRAGMA synchronous = OFF")  # a power cut may cost the index, never an entry
        if not _is_made(db):
            transaction(db, "BEGIN IMMEDIATE", self._make)

    def discard(self, path: Path) -> None:
        """See `Database.discard`. Nothing is kept: the labels reveal texts."""
        if remove(path) and path == self.path:
            logger.warning("the index %s is damaged and made again from the files, without labels", path)

    def _make(self, db: sqlite3.Connection) -> None:
        if _is_made(db):
            return  # another process was faster
        for statement in filter(str.strip, _TABLES.split(";")):
            db.execute(statement)
        found = sorted((facts.mtime_ns, facts.size, name) for name, facts in self._layout.scan().items() if facts)
        rows = ((name, kind_of(name), size, time, used) for used, (time, size, name) in enumerate(found))
        db.executemany(_PUT, rows)  # no use is known: the oldest first
        db.execute(f"PRAGMA user_version = {_VERSION}")

    def _update(self, db: sqlite3.Connection, names: Collection[str], labels: Mapping[str, bytes]) -> None:
        clock = _clock(db)
        # A temp file that is gone may be the entry by now, and whoever wrote it has yet to say so.
        names = {*names, *(entry_of(name) for name in names if kind_of(name) is Kind.TEMP)}
        kinds = {name: kind_of(name) for name in names}
        there = {name: self._layout.look(name) for name in names}
        for name in sorted(names, key=lambda name: (there[name] or _NOTHING).mtime_ns):
            now, kind = there[name], kinds[name]
            row = db.execute("SELECT size, mtime_ns FROM files WHERE name = ?", (name,)).fetchone()
            outdated = now != row and kind is not Kind.TEMP  # of a temp file the row tells what it will be
            if row and (now is None or outdated):
                _forget(db, name)
            if now and (row is None or outdated):
                clock += 1
                db.execute(_PUT, (name, kind, *now, clock))
            if now and labels.get(name):
                db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?)", (name, labels[name]))
        if Kind.BAD in kinds.values():
            for (name,) in db.execute(_TOO_OLD_EVIDENCE).fetchall():
                self._remove(db, name)

    def _rows(self) -> dict[str, Facts]:
        query = "SELECT name, size, mtime_ns FROM files"
        return self.run("BEGIN", lambda db: {name: Facts(*facts) for name, *facts in db.execute(query)})

    def _labels_behind(self, rowid: int) -> list[tuple[int, str, bytes]]:
        query = "SELECT rowid, name, label FROM labels WHERE rowid > ? ORDER BY rowid LIMIT ?"
        return self.run("BEGIN", lambda db: db.execute(query, (rowid, _LABELS_AT_ONCE)).fetchall())

    def _write_uses(self, db: sqlite3.Connection) -> None:
        clock = _clock(db)
        for used in range(clock + 1, clock + 1 + len(self._uses)):
            db.execute("UPDATE files SET used = ? WHERE name = ?", (used, self._uses.popleft()))

    def _make_room(
        self, db: sqlite3.Connection, size: int, replaced: str, quota: int, spared: AbstractSet[str]
    ) -> Reserved:
        missing = size - quota + _sum(db, "name != ?", replaced)
        if missing <= 0:
            return Reserved(0, 0)
        stays = [name for name in spared if name != replaced]
        fixed = _sum(db, f"name != ? AND (kind = 'temp' OR name IN ({', '.join('?' * len(stays))}))", replaced, *stays)
        if fixed + size > quota:
            return Reserved(fixed + size - quota, 0)  # removing all the rest would not help
        evicted = 0
        for name, its in _least_wanted_first(db, {replaced, *spared}):
            if missing <= 0:
                break
            if self._remove(db, name):
                missing -= its
                evicted += kind_of(name) is Kind.ENTRY
        return Reserved(max(missing, 0), evicted)

    def _remove(self, db: sqlite3.Connection, name: str) -> bool:
        """Remove the file and then its row: what is killed in between leaves a row too many, never one too few."""
        if kind_of(name):  # a damaged index may name anything
            try:
                remove(self._layout.path(name))
            except OSError:
                return False  # somebody else's
        _forget(db, name)
        return True


def _is_made(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA user_version").fetchone()[0] == _VERSION)


def _clock(db: sqlite3.Connection) -> int:
    """The number of the latest use. A counter: what happens to the clock of the machine does not matter."""
    return int(db.execute("SELECT coalesce(max(used), 0) FROM files").fetchone()[0])


def _sum(db: sqlite3.Connection, where: str, *names: str) -> int:
    return int(db.execute(f"SELECT coalesce(sum(size), 0) FROM files WHERE {where}", names).fetchone()[0])


def _least_wanted_first(db: sqlite3.Connection, spared: AbstractSet[str]) -> Iterator[tuple[str, int]]:
    """Name and size of files that may be removed; each is given once, removed or not."""
    average = db.execute("SELECT avg(size) FROM files").fetchone()[0]
    clock, passed = _clock(db) + 1, set(spared)
    while True:
        ranking = {"clock": clock, "average": average, "number": len(passed) + _RANKED_AT_ONCE}
        some = [row for row in db.execute(_LEAST_WANTED_FIRST, ranking).fetchall() if row[0] not in passed]
        if not some:
            return
        yield from some
        passed |= {name for name, _ in some}


def _forget(db: sqlite3.Connection, name: str) -> None:
    db.execute("DELETE FROM files WHERE name = ?", (name,))
    db.execute("DELETE FROM labels WHERE name = ?", (name,))
