"""Entries as objects in S3, Google Cloud Storage, Azure or whatever speaks their language.

    PREFIX/entries/ab/KEY.safetensors    one entry
    PREFIX/labels/ab/KEY                 its label, an object of its own: listing does not return what is in an object
    PREFIX/bad/ab/KEY.safetensors        a damaged entry, set aside for inspection
    PREFIX/records/NAME.json             a small record
    PREFIX/documents/SHA256/KEY          empty: the document with this digest needs this entry …
    PREFIX/needs/KEY/SHA256              … and the same the other way round

No lock is needed: an object is replaced as a whole, a record only ever created, each link is an object of its own, and
a reader asks for the version that it has begun with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rag_blend.errors import ChunkNotFoundError, install_hint
from rag_blend.storage._blocks import FIRST_BYTES, BlockReader, changed_meanwhile
from rag_blend.storage._guard import DeniedError, Guard
from rag_blend.storage._guarded import GuardedBackend
from rag_blend.storage._object_url import ObjectUrl
from rag_blend.storage.base import EntryReader, StorageStats, checked_key

try:
    import obstore
    import obstore.store
    from obstore import exceptions as obstore_errors
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('s3')}", name=missing.name) from None

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

_PAGE = 1000  # objects listed in one request
_AT_ONCE = 8  # small requests made at once
_NAME = re.compile(r"(?:[0-9a-f]{2}/)?([0-9a-f]{64})\.(?:safetensors|json)")
_REFUSAL = re.compile(r"status code: 4(?!08|29)\d\d")  # neither "timed out" nor "too many requests"
_PREFIX = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*)?")
_used_in_process: int | None = None  # the library's threads do not survive a fork


class ObjectStoreBackend(GuardedBackend):
    """One object per entry.

    Args:
        store: An obstore store, or what makes one, given the longest time in seconds that a request may take.
        prefix: In front of all names, without slashes around it.
        deadline_s: Longest time for a call on which a query waits, in seconds.
        write_deadline_s: Longest time for one that writes or deletes.
        name: What errors call the store.

    Raises:
        ValueError: The prefix cannot be used.
    """

    parallel_reads = 8

    def __init__(
        self,
        store: ObjectStore | Callable[[float], ObjectStore],
        prefix: str = "",
        deadline_s: float = 1.0,
        write_deadline_s: float = 30.0,
        name: str = "the object store",
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"a prefix is words of letters, digits, _ - . with / between them, got {prefix!r}")
        self._prefix = f"{prefix}/" if prefix else ""

        def connect(seconds: float) -> ObjectStore:
            _refuse_after_fork()
            return store(seconds) if callable(store) else store

        self._guard: Guard[ObjectStore] = Guard(name, connect, _leave, _translated, deadline_s, write_deadline_s)

    @classmethod
    def from_url(cls, rest: str) -> ObjectStoreBackend:
        """Open from a URL. Credentials come from the environment, as obstore and the clouds' own tools find them.

        Args:
            rest: ``s3://BUCKET/PREFIX``, ``gs://…``, ``az://CONTAINER/PREFIX``, ``abfss://…`` or ``memory://``. Behind
                ``?``: ``endpoint``, ``region``, ``deadline_s``, ``write_deadline_s``.

        Raises:
            ValueError: It cannot be used, or contains credentials: URLs end up in logs.
        """
        if rest in ("memory://", "memory:///"):
            return cls(obstore.store.MemoryStore())
        url = ObjectUrl.parse(rest)
        connect = _connector(url, url.deadlines.get("deadline_s", 1.0))
        try:
            connect(1.0)  # asks nobody, but knows what is missing
        except (ValueError, obstore_errors.BaseError) as error:
            raise ValueError(f"{url.bucket} cannot be used: {_text(error)}") from None
        return cls(connect, url.prefix, name=url.bucket, **url.deadlines)

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`."""
        entry, label_path, content = self._entry(key), self._label(key), bytes(data)

        def put(store: ObjectStore) -> None:
            if label:
                obstore.put(store, label_path, label)  # first: an entry whose label is lost is slow to list
            else:
                _delete(store, label_path)
            obstore.put(store, entry, content, use_multipart=False)  # one request: nothing is left of an aborted one

        self._guard.change(put)

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`. A large entry that is deleted or replaced cannot be read to its end: OSError."""
        path = self._entry(key)
        try:
            size, version, first = self._guard.read(lambda store: _get_first(store, path))
        except FileNotFoundError:
            raise ChunkNotFoundError(key) from None

        def fetch(offset: int, length: int) -> memoryview:
            block = self._guard.read(lambda store: _get_same(store, path, version, offset, length))
            if block is None:
                raise changed_meanwhile(key)
            return block

        return BlockReader(size, first, fetch)

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        entry, others = self._entry(key), (self._label(key), self._bad(key))

        def delete(store: ObjectStore) -> bool:
            was_there = _is_there(store, entry)
            for path in (entry, *others):
                _delete(store, path)
            return was_there

        return self._guard.change(delete)

    def quarantine(self, key: str) -> None:
        """See `StorageBackend.quarantine`. It is kept until the entry is deleted, for inspection."""
        entry, bad = self._entry(key), self._bad(key)

        def move(store: ObjectStore) -> None:
            obstore.copy(store, entry, bad)
            _delete(store, entry)

        with contextlib.suppress(FileNotFoundError):
            self._guard.read(move)  # a query may be waiting

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`."""
        return (name for page in self._pages("entries") for name, _ in page)

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """See `StorageBackend.labels`. One small request each, many at once."""
        for page in self._pages("entries"):
            labels = _each(self._guard.look, _get, [self._label(key) for key, _ in page])
            yield from ((key, label or b"") for (key, _), label in zip(page, labels, strict=True))

    def stats(self) -> StorageStats:
        """See `StorageBackend.stats`."""
        sizes = [size for page in self._pages("entries") for _, size in page]
        return StorageStats(len(sizes), sum(sizes), counts=self.counts)

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        digest, ours = _digest(document), sorted({checked_key(key) for key in keys})
        # In this order: a link that is only half there never keeps an entry from being deleted with its document.
        _each(self._guard.change, _put_empty, [self._documents(digest) + key for key in ours])
        _each(self._guard.change, _put_empty, [self._needs(key) + digest for key in ours])

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        digests = {_digest(document) for document in documents}
        keys = sorted(set[str]().union(*self._listed([self._documents(digest) for digest in sorted(digests)])))
        needing = self._listed([self._needs(key) for key in keys])
        return [key for key, others in zip(keys, needing, strict=True) if others <= digests]

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `StorageBackend.needed_by_others`."""
        digests, ordered = {_digest(document) for document in documents}, sorted(keys)
        needing = self._listed([self._needs(key) for key in ordered])
        return {key for key, others in zip(ordered, needing, strict=True) if others - digests}

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        digests = sorted(_digest(document) for document in documents)
        for digest, keys in zip(digests, self._listed([self._documents(one) for one in digests]), strict=True):
            # In this order: after a failure, calling it again finishes.
            _each(self._guard.change, _delete, [self._needs(key) + digest for key in keys])
            _each(self._guard.change, _delete, [self._documents(digest) + key for key in keys])

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        path = self._record(name)
        try:
            return self._guard.look(lambda store: _get(store, path))
        except FileNotFoundError:
            return None

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`."""
        return (name for page in self._pages("records") for name, _ in page)

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        path, content = self._record(name), bytes(data)

        def put(store: ObjectStore) -> None:
            with contextlib.suppress(obstore_errors.AlreadyExistsError):
                obstore.put(store, path, content, mode="create")

        self._guard.change(put)

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        path = self._record(name)
        self._guard.change(lambda store: _delete(store, path))

    def close(self) -> None:
        """See `StorageBackend.close`."""
        self._guard.close()

    def __contains__(self, key: str) -> bool:
        path = self._entry(key)
        return self._guard.read(lambda store: _is_there(store, path))

    def _entry(self, key: str) -> str:
        return f"{self._prefix}entries/{checked_key(key)[:2]}/{key}.safetensors"

    def _label(self, key: str) -> str:
        return f"{self._prefix}labels/{checked_key(key)[:2]}/{key}"

    def _bad(self, key: str) -> str:
        return f"{self._prefix}bad/{checked_key(key)[:2]}/{key}.safetensors"

    def _record(self, name: str) -> str:
        return f"{self._prefix}records/{checked_key(name)}.json"

    def _documents(self, digest: str) -> str:
        return f"{self._prefix}documents/{digest}/"

    def _needs(self, key: str) -> str:
        return f"{self._prefix}needs/{key}/"

    def _pages(self, directory: str) -> Iterator[list[tuple[str, int]]]:
        """Names (64 hex digits) and sizes of all objects in a directory."""
        prefix = f"{self._prefix}{directory}/"
        stream = self._guard.look(lambda store: obstore.list(store, prefix, chunk_size=_PAGE))
        while page := self._guard.look(lambda _: next(stream, None)):
            found = ((_NAME.fullmatch(meta["path"].removeprefix(prefix)), meta["size"]) for meta in page)
            yield [(name[1], size) for name, size in found if name]

    def _listed(self, prefixes: Sequence[str]) -> list[set[str]]:
        """The last words of the names that begin with each of these."""
        found = _each(self._guard.change, _list, prefixes)
        return [{meta["path"].rpartition("/")[2] for meta in page or ()} for page in found]


def _connector(url: ObjectUrl, deadline_s: float) -> Callable[[float], ObjectStore]:
    def connect(seconds: float) -> ObjectStore:
        client: Any = {
            "timeout": timedelta(seconds=seconds + 1.0),  # only ends what nobody waits for any more
            "connect_timeout": timedelta(seconds=min(seconds, deadline_s) + 1.0),
        }
        if any(value.startswith("http://") for value in url.settings.values()):
            client["allow_http"] = True
        settings: Any = url.settings  # of one cloud or another
        return obstore.store.from_url(
            url.bucket, config=settings, client_options=client, retry_config={"max_retries": 0}
        )

    return connect


def _refuse_after_fork() -> None:
    """Obstore's own threads exist only in the process that first used them: in a child of it, calls would hang.

    Raises:
        OSError: This is such a child.
    """
    global _used_in_process
    if _used_in_process not in (None, os.getpid()):
        raise OSError("an object store that was used before a fork cannot be used after it: start processes by spawn")
    _used_in_process = os.getpid()


def _leave(store: ObjectStore) -> None:
    """A request cannot be cut off; it ends by its own timeout."""


def _translated(error: Exception) -> Exception:
    text = _text(error)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(text)
    if isinstance(error, obstore_errors.GenericError | obstore_errors.JoinError) and not _REFUSAL.search(text):
        return OSError(text)
    if isinstance(error, obstore_errors.BaseError):  # not allowed, not supported, …
        return DeniedError(text)
    return error


def _text(error: Exception) -> str:
    """The first line of what the library says, without what follows a '?': a URL may be signed there."""
    return re.sub(r"\?\S*", "", str(error).partition("\n")[0])[:300]


def _get_first(store: ObjectStore, path: str) -> tuple[int, str | None, memoryview]:
    """An object's size, its version, and its first bytes."""
    try:
        result = obstore.get(store, path, options={"range": (0, FIRST_BYTES)})
        return result.meta["size"], result.meta["e_tag"], memoryview(result.bytes())
    except obstore_errors.BaseError:
        if obstore.head(store, path)["size"]:
            raise
        return 0, None, memoryview(b"")  # an empty object has no range


def _get_same(store: ObjectStore, path: str, version: str | None, offset: int, length: int) -> memoryview | None:
    """A range of an object, or None if it has another version by now."""
    try:
        result = obstore.get(store, path, options={"range": (offset, offset + length), "if_match": version})
    except (FileNotFoundError, obstore_errors.PreconditionError):
        return None
    same = result.meta["e_tag"] == version  # some servers do not know conditions
    return memoryview(result.bytes()) if same else None


def _is_there(store: ObjectStore, path: str) -> bool:
    try:
        obstore.head(store, path)
    except FileNotFoundError:
        return False
    return True


def _get(store: ObjectStore, path: str) -> bytes:
    return bytes(obstore.get(store, path).bytes())


def _put_empty(store: ObjectStore, path: str) -> None:
    obstore.put(store, path, b"")


def _delete(store: ObjectStore, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # some clouds mind
        obstore.delete(store, path)


def _list(store: ObjectStore, prefix: str) -> Sequence[ObjectMeta]:
    return obstore.list(store, prefix).collect()


def _each(
    call: Callable[[Callable[[ObjectStore], T]], T], request: Callable[[ObjectStore, str], T], names: Sequence[str]
) -> list[T | None]:
    """Make this request for each of these names, several at once; None for what is not there.

    By threads, not by asyncio: obstore's own threads then call into Python, and abort a process that ends meanwhile.
    """

    def one(name: str) -> T | None:
        try:
            return call(lambda store: request(store, name))
        except FileNotFoundError:
            return None

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(one, names))
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        return [one(name) for name in names]


def _digest(document: str) -> str:
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()
