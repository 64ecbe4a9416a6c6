"""A remote tier for tests: it can be down, refuse, hang, and let one call through at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rag_blend.storage import StorageBackend
from rag_blend.storage.base import EntryReader
from rag_blend.storage.memory import MemoryBackend


class Remote(MemoryBackend):
    """Counts as durable, and belongs to nobody: several `TieredBackend`s with the same one are several processes.

    Attributes:
        calls: How often each method was called; ``read`` for reads of its entries.
        is_down: All calls fail, as those to a server that is gone.
        refuses: Names of methods that fail, as on a full disk.
        before: Called with the name of each method, before it does anything.
        after: The same when it is done.
        was_closed: `close` was called.
    """

    durable = True

    def __init__(self, quota_bytes: int | None = None) -> None:
        super().__init__(quota_bytes)
        self.calls: Counter[str] = Counter()
        self.is_down = False
        self.refuses: set[str] = set()
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.was_closed = False

    def _call(self, name: str, *args: Any) -> Any:
        self._begin(name)
        result = getattr(super(), name)(*args)
        self.after(name)
        return result

    def _begin(self, name: str) -> None:
        self.calls[name] += 1
        self.before(name)
        if self.is_down:
            raise ConnectionError("the server is gone")
        if name in self.refuses:
            raise OSError("No space left on device")

    def write(self, key: str, data: bytes, label: bytes = b"") -> None:
        self._call("write", key, data, label)

    def open(self, key: str) -> EntryReader:
        return _RemoteReader(self._call("open", key), self)

    def delete(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def quarantine(self, key: str) -> None:
        self._call("quarantine", key)

    def keys(self) -> Iterator[str]:
        yield from self._call("keys")

    def labels(self) -> Iterator[tuple[str, bytes]]:
        yield from self._call("labels")

    def stats(self) -> Any:
        return self._call("stats")

    def link(self, document: str, keys: Any) -> None:
        self._call("link", document, keys)

    def needed_only_by(self, documents: Any) -> list[str]:
        return list(self._call("needed_only_by", documents))

    def needed_by_others(self, documents: Any, keys: Any) -> set[str]:
        return set(self._call("needed_by_others", documents, keys))

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        yield from self._call("documents")

    def unlink(self, documents: Any) -> None:
        self._call("unlink", documents)

    def get_record(self, name: str) -> bytes | None:
        found: bytes | None = self._call("get_record", name)
        return found

    def records(self) -> Iterator[str]:
        yield from self._call("records")

    def put_record(self, name: str, data: bytes) -> None:
        self._call("put_record", name, data)

    def delete_record(self, name: str) -> None:
        self._call("delete_record", name)

    def __contains__(self, key: str) -> bool:
        self._begin("__contains__")
        found = key in self._entries
        self.after("__contains__")
        return found

    def close(self) -> None:
        self.was_closed = True


class _RemoteReader(EntryReader):
    def __init__(self, reader: EntryReader, remote: Remote) -> None:
        self.size = reader.size
        self._reader = reader
        self._remote = remote

    def read(self, offset: int, length: int) -> Any:
        self._remote.calls["read"] += 1
        if self._remote.is_down:
            raise ConnectionError("the server is gone")
        return self._reader.read(offset, length)

    def close(self) -> None:
        self._reader.close()


class Gate:
    """Holds up a remote's calls of some method until it is opened. Use as `remote.before` or `remote.after`."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._opened = threading.Event()
        self._reached = threading.Event()

    def __call__(self, name: str) -> None:
        if name in self._names and not self._opened.is_set():
            self._reached.set()
            assert self._opened.wait(30)

    def open(self) -> None:
        self._opened.set()

    def wait_until_reached(self) -> None:
        assert self._reached.wait(10), "nobody came to the gate"


class Actor(threading.Thread):
    """Does something whose calls of some backends are let through one at a time."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._may_go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_done = False
        self.steps = -1  # the first one is only to begin
        self.start()
        self._stands.acquire()

    def run(self) -> None:
        self.stop_here("")
        try:
            self._act()
        except BaseException as error:
            self._error = error
        finally:
            self._is_done = True
            self._stands.release()

    def stop_here(self, name: str) -> None:
        """Wait until it is this actor's turn; called by itself."""
        self.steps += 1
        self._stands.release()
        self._may_go.acquire()

    def step(self) -> None:
        """Let it go on to its next call, or to its end."""
        if not self._is_done:
            self._may_go.release()
            assert self._stands.acquire(timeout=10), "an actor waits for another one"

    def finish(self) -> None:
        """Let it go on to its end; raises what it raised."""
        while not self._is_done:
            self.step()
        if self._error is not None:
            raise self._error


def interleave(acts: Sequence[Callable[[], object]], backends: Sequence[Remote], order: Sequence[int]) -> list[int]:
    """Run `acts` so that their calls of `backends` happen in this order.

    Args:
        acts: What is done, each in a thread of its own.
        backends: Whose calls count as steps.
        order: Indices of `acts`: whose turn it is. What is left in the end is done one after the other.

    Returns:
        How many steps each of them took.
    """
    actors = [Actor(act) for act in acts]

    def stop(name: str) -> None:
        actor = threading.current_thread()
        if isinstance(actor, Actor):
            actor.stop_here(name)

    for backend in backends:
        backend.before = stop
    for actor in actors:
        actor.step()  # to its first call
    for i in order:
        actors[i].step()
    for actor in actors:
        actor.finish()
    for backend in backends:
        backend.before = lambda name: None
    return [actor.steps for actor in actors]


def drained(backend: StorageBackend) -> bool:
    """Whether nothing is under way any more."""
    return bool(backend.flush(10))  # type: ignore[attr-defined]
