"""Entries in Redis or Valkey, shared by all processes and machines that reach it.

    PREFIX:entry:KEY         one entry, with its label and a version, in one string: evicted and replaced as a whole
    PREFIX:bad:KEY           a damaged entry, set aside for a day
    PREFIX:record:NAME       a small record
    PREFIX:document:SHA256   the keys that a document needs, a set; the name is the digest of the document's
    PREFIX:needs:KEY         the documents that need a key, a set of digests

A Redis that evicts with ``allkeys-…`` may evict the small keys as well: then nobody knows any more which entries a
document needs, and they cannot be forgotten by it. Let it evict entries only: ``maxmemory-policy volatile-lru``, and
``expire_s`` in the URL, which makes entries, and nothing else, volatile.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from rag_blend.errors import ChunkNotFoundError, CorruptChunkError, install_hint
from rag_blend.storage._blocks import FIRST_BYTES, BlockReader, changed_meanwhile
from rag_blend.storage._guard import DeniedError, Guard
from rag_blend.storage._guarded import GuardedBackend
from rag_blend.storage.base import EntryReader, StorageStats, checked_key

try:
    from redis import ConnectionPool, Redis
    from redis import exceptions as redis_errors
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('redis')}", name=missing.name) from None

MAX_VALUE_BYTES = 512 << 20  # Redis' own limit, proto-max-bulk-len
_KEPT_BAD_S = 24 * 3600
_PAGE = 500  # keys asked about in one round trip
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]+)*")  # nothing that means something in a pattern of SCAN
_KEY = re.compile(r"[0-9a-f]{64}")
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "prefix": str,
    "deadline_s": float,
    "write_deadline_s": float,
    "expire_s": int,
}
_EXAMPLE = "redis://:PASSWORD@HOST:6379/0?prefix=rag_blend&deadline_s=1.0&write_deadline_s=30&expire_s=2592000"


class RedisBackend(GuardedBackend):
    """One Redis string per entry.

    Args:
        where: Its URL (user, password, host, port, database and options as redis-py takes them), or a client. A client
            must be safe to use from several threads, and should neither retry nor wait for long.
        prefix: Of all its keys.
        deadline_s: Longest time for a call on which a query waits, in seconds.
        write_deadline_s: Longest time for one that writes or deletes.
        expire_s: How long an entry stays after it was written; None: until it is deleted or evicted.

    Raises:
        ValueError: The URL or another argument cannot be used.
    """

    parallel_reads = 2  # a Redis answers one command at a time: more were no faster

    def __init__(
        self,
        where: str | Redis,
        prefix: str = "rag_blend",
        deadline_s: float = 1.0,
        write_deadline_s: float = 30.0,
        expire_s: int | None = None,
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"a prefix is letters, digits and any of _ . - :, got {prefix!r}")
        if expire_s is not None and expire_s < 1:
            raise ValueError(f"expire_s must be at least 1 s, got {expire_s}")
        self._prefix = prefix
        self._expire_s = expire_s
        name, connect = _server(where) if isinstance(where, str) else ("Redis", lambda _: where)
        disconnect = _disconnect if isinstance(where, str) else _leave
        self._guard = Guard(name, connect, disconnect, _translated, deadline_s, write_deadline_s)

    @classmethod
    def from_url(cls, rest: str) -> RedisBackend:
        """Open from a URL.

        Args:
            rest: A URL of the scheme ``redis``, ``rediss`` (TLS), ``valkey`` or ``valkeys``, or what follows
                ``redis://``. Behind ``?``: ``prefix``, ``deadline_s``, ``write_deadline_s``, ``expire_s``, and
                redis-py's own options (``ssl_ca_certs``, …).

        Raises:
            ValueError: It cannot be used.
        """
        url = _split(rest if "://" in rest else f"redis://{rest}")
        options = parse_qsl(url.query, keep_blank_values=True)
        ours: dict[str, Any] = {}
        for option, value in options:
            if option in _OPTIONS:
                try:
                    ours[option] = _OPTIONS[option](value)
                except ValueError:
                    raise ValueError(f"{option}={value} is not a number; use {_EXAMPLE}") from None
        theirs = urlencode([(option, value) for option, value in options if option not in _OPTIONS])
        return cls(url._replace(query=theirs).geturl(), **ours)

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        """See `StorageBackend.write`. It is as durable as the server is set up to be.

        Raises:
            OSError: The medium refused, or the entry is too large for Redis; nothing has changed.
        """
        name = self._name("entry", checked_key(key))
        frame = _Frame(secrets.token_bytes(16), len(label), len(data))
        if frame.value_bytes > MAX_VALUE_BYTES:
            raise OSError(errno.EFBIG, f"an entry of {len(data)} bytes: a value in Redis has at most {MAX_VALUE_BYTES}")
        value = frame.packed + label + data
        self._guard.change(lambda client: client.set(name, value, ex=self._expire_s))

    def open(self, key: str) -> EntryReader:
        """See `StorageBackend.open`. A large entry that is deleted or replaced cannot be read to its end: OSError."""
        name = self._name("entry", checked_key(key))
        (first,) = self._guard.read(_together(("GETRANGE", name, 0, FIRST_BYTES - 1)))
        if not first:
            raise ChunkNotFoundError(key)
        frame = _Frame.read(first)
        if frame is None or len(first) != min(frame.value_bytes, FIRST_BYTES):
            raise CorruptChunkError(f"entry {key[:12]}: what is in Redis is not what was written")

        def fetch(offset: int, length: int) -> bytes:
            start = frame.data_start + offset
            before, block, after = self._guard.read(
                _together(
                    ("GETRANGE", name, 0, _FRAME.size - 1),
                    ("GETRANGE", name, start, start + length - 1),
                    ("GETRANGE", name, 0, _FRAME.size - 1),
                )
            )
            if not before == after == frame.packed:
                raise changed_meanwhile(key)
            return bytes(block)

        return BlockReader(frame.data_bytes, memoryview(first)[frame.data_start :], fetch)

    def delete(self, key: str) -> bool:
        """See `StorageBackend.delete`."""
        entry, bad = self._name("entry", checked_key(key)), self._name("bad", key)
        was_there, _ = self._guard.change(_together(("UNLINK", entry), ("UNLINK", bad)))
        return bool(was_there)

    def quarantine(self, key: str) -> None:
        """See `StorageBackend.quarantine`. It is kept for a day, for inspection."""
        entry, bad = self._name("entry", checked_key(key)), self._name("bad", key)

        def rename(client: Redis) -> None:
            pipeline: Any = client.pipeline(transaction=False)
            renamed, _ = pipeline.rename(entry, bad).expire(bad, _KEPT_BAD_S).execute(raise_on_error=False)
            if isinstance(renamed, Exception) and "no such key" not in str(renamed):
                raise renamed

        self._guard.read(rename)  # a query may be waiting

    def keys(self) -> Iterator[str]:
        """See `StorageBackend.keys`."""
        return itertools.chain.from_iterable(self._pages("entry"))

    def labels(self) -> Iterator[tuple[str, bytes]]:
        """See `StorageBackend.labels`."""
        for keys, frames in self._frames():
            ranges = [(_FRAME.size, frame.label_bytes if frame else 0) for frame in frames]
            yield from zip(keys, self._ranges(keys, ranges), strict=True)

    def stats(self) -> StorageStats:
        """See `StorageBackend.stats`."""
        sizes = [frame.data_bytes if frame else 0 for _, frames in self._frames() for frame in frames]
        return StorageStats(len(sizes), sum(sizes), counts=self.counts)

    def link(self, document: str, keys: Iterable[str]) -> None:
        """See `StorageBackend.link`."""
        digest = _digest(document)
        for page in _batches(sorted({checked_key(key) for key in keys})):
            needs = [("SADD", self._name("needs", key), digest) for key in page]
            # In this order: a link that is only half there never keeps an entry from being deleted with its document.
            self._guard.change(_together(("SADD", self._name("document", digest), *page), *needs))

    def needed_only_by(self, documents: AbstractSet[str]) -> list[str]:
        """See `StorageBackend.needed_only_by`."""
        digests = sorted(_digest(document) for document in documents)
        keys = sorted(set[str]().union(*self._members("document", digests)))
        return [key for key, others in zip(keys, self._members("needs", keys), strict=True) if others <= set(digests)]

    def needed_by_others(self, documents: AbstractSet[str], keys: AbstractSet[str]) -> set[str]:
        """See `StorageBackend.needed_by_others`."""
        digests, ordered = {_digest(document) for document in documents}, sorted(keys)
        needing = self._members("needs", ordered)
        return {key for key, others in zip(ordered, needing, strict=True) if others - digests}

    def unlink(self, documents: AbstractSet[str]) -> None:
        """See `StorageBackend.unlink`."""
        digests = sorted(_digest(document) for document in documents)
        for digest, keys in zip(digests, self._members("document", digests), strict=True):
            for page in _batches(sorted(keys)):
                # Just what was read, not all there is: what another process links meanwhile stays, both ways.
                needs = [("SREM", self._name("needs", key), digest) for key in page]
                self._guard.change(_together(*needs, ("SREM", self._name("document", digest), *page)))

    def get_record(self, name: str) -> bytes | None:
        """See `StorageBackend.get_record`."""
        (data,) = self._guard.look(_together(("GET", self._name("record", checked_key(name)))))
        return None if data is None else bytes(data)

    def records(self) -> Iterator[str]:
        """See `StorageBackend.records`."""
        return itertools.chain.from_iterable(self._pages("record"))

    def put_record(self, name: str, data: bytes) -> None:
        """See `StorageBackend.put_record`."""
        self._guard.change(_together(("SET", self._name("record", checked_key(name)), bytes(data), "NX")))

    def delete_record(self, name: str) -> None:
        """See `StorageBackend.delete_record`."""
        self._guard.change(_together(("UNLINK", self._name("record", checked_key(name)))))

    def close(self) -> None:
        """See `StorageBackend.close`."""
        self._guard.close()

    def __contains__(self, key: str) -> bool:
        (found,) = self._guard.read(_together(("EXISTS", self._name("entry", checked_key(key)))))
        return bool(found)

    def _name(self, kind: str, key: str) -> str:
        return f"{self._prefix}:{kind}:{key}"

    def _pages(self, kind: str) -> Iterator[list[str]]:
        """The keys of all names of a kind."""
        before = self._name(kind, "")
        seen: set[str] = set()  # SCAN may name a key twice while Redis rehashes
        cursor = 0
        while True:
            ((cursor, names),) = self._guard.look(_together(("SCAN", cursor, "MATCH", f"{before}*", "COUNT", _PAGE)))
            keys = {name.decode("ascii", "replace").removeprefix(before) for name in names} - seen
            page = [key for key in keys if _KEY.fullmatch(key)]
            seen.update(page)
            if page:
                yield page
            if not cursor:
                return

    def _frames(self) -> Iterator[tuple[list[str], list[_Frame | None]]]:
        """The keys present and what their entries begin with; None for what is not an entry."""
        for page in self._pages("entry"):
            begins = self._ranges(page, [(0, _FRAME.size)] * len(page))
            present = [(key, begin) for key, begin in zip(page, begins, strict=True) if begin]  # others were evicted
            yield [key for key, _ in present], [_Frame.read(begin) for _, begin in present]

    def _ranges(self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Of each of these entries the bytes from an offset on, so many."""
        wanted = zip(keys, ranges, strict=True)
        commands = (("GETRANGE", self._name("entry", key), at, at + length - 1) for key, (at, length) in wanted)
        return self._guard.look(_together(*commands))

    def _members(self, kind: str, keys: Sequence[str]) -> list[set[str]]:
        """What these sets hold."""
        found: list[set[str]] = []
        for page in _batches(keys):
            members = self._guard.change(_together(*(("SMEMBERS", self._name(kind, key)) for key in page)))
            found += ({member.decode("ascii") for member in one} for one in members)
        return found


_FRAME = struct.Struct("<4s16sIQ")
_MAGIC = b"RBE1"


class _Frame(NamedTuple):
    """What stands in front of an entry in its string; then come the label and the entry's bytes."""

    version: bytes  # random: no two writes have the same
    label_bytes: int
    data_bytes: int

    @classmethod
    def read(cls, value: bytes) -> _Frame | None:
        """The frame that a value begins with, if there is one."""
        if len(value) < _FRAME.size:
            return None
        magic, *fields = _FRAME.unpack_from(value)
        frame = cls(*fields)
        return frame if magic == _MAGIC and frame.value_bytes <= MAX_VALUE_BYTES else None

    @property
    def packed(self) -> bytes:
        return _FRAME.pack(_MAGIC, *self)

    @property
    def data_start(self) -> int:
        return _FRAME.size + self.label_bytes

    @property
    def value_bytes(self) -> int:
        return self.data_start + self.data_bytes


def _server(url: str) -> tuple[str, Callable[[float], Redis]]:
    """A server's name without the password, and what makes a client of it.

    Raises:
        ValueError: The URL cannot be used. Its text is not shown: it may contain a password.
    """
    scheme, _, rest = url.partition("://")
    url = f"{scheme.lower().replace('valkey', 'redis')}://{rest}"
    parts = _split(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError(f"not the URL of a Redis: use {_EXAMPLE}")
    if parts.fragment:
        raise ValueError("a Redis URL has no '#': write %23 if it belongs to the password")

    def connect(seconds: float) -> Redis:
        pool = ConnectionPool.from_url(
            url,
            retry=Retry(NoBackoff(), 0),  # redis-py would try ten times
            socket_timeout=seconds + 1.0,  # only ends what nobody waits for any more
            socket_connect_timeout=seconds + 1.0,
            protocol=2,  # with this and the next one, connecting takes one round trip, or two with a password
            driver_info=None,
        )
        return Redis(connection_pool=pool)

    try:
        connect(1.0).connection_pool.make_connection()  # asks nobody, but knows all options
    except (TypeError, ValueError, redis_errors.RedisError) as error:
        raise ValueError(f"not the options of a Redis: {error}; use {_EXAMPLE}") from None
    return f"redis://{parts.hostname}:{parts.port or 6379}", connect


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it is only looked at now
    except ValueError:  # its text shows what may be a password
        raise ValueError(f"not the URL of a Redis: use {_EXAMPLE}") from None
    return parts


def _disconnect(client: Redis) -> None:
    client.connection_pool.disconnect()


def _leave(client: Redis) -> None:
    """Somebody else's client stays connected."""


def _translated(error: Exception) -> Exception:
    if isinstance(error, redis_errors.TimeoutError):
        return TimeoutError(str(error))
    if isinstance(error, redis_errors.ResponseError):
        return DeniedError(f"Redis refused: {error}")
    if isinstance(error, redis_errors.RedisError):
        return ConnectionError(str(error))
    return error


def _together(*commands: tuple[Any, ...]) -> Callable[[Redis], list[Any]]:
    """Work for a client: these commands in one round trip, in this order.

    Others may come between them. A transaction would not let them, but a full Redis refuses even those that only read.
    """

    def work(client: Redis) -> list[Any]:
        pipeline: Any = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute())

    return work


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + _PAGE] for start in range(0, len(keys), _PAGE))


def _digest(document: str) -> str:
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()
