"""One engine per model and storage in a process, however many LangChain objects use it.

Applications make a `ChatBlend` per chain, per request, or in every cell of a notebook. They all get the same
engine, and with it the same queue in front of the model. An engine is closed when the last object that uses it
is closed; objects that are merely dropped leave it loaded for the next one.
"""

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer

from langchain_rag_blend.contexts import Contexts
from rag_blend import BlendEngine


class SharedEngine:
    """An engine that is made when it is first needed, its users, and what they know about contexts."""

    def __init__(self) -> None:
        """Start without an engine."""
        self.contexts = Contexts()
        self._engine: BlendEngine | None = None
        self._users: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def loaded(self) -> BlendEngine | None:
        """The engine, if somebody has needed it already."""
        return self._engine

    def get(self, user: "Lease", make: Callable[[], BlendEngine]) -> BlendEngine:
        """Return the engine; the first caller makes it while the others wait."""
        with self._lock:
            if self._engine is None:
                self._engine = make()
            self._users.add(user)
            return self._engine

    def release(self, user: "Lease") -> None:
        """Close the engine unless somebody else uses it."""
        with self._lock:
            self._users.discard(user)
            if self._users or self._engine is None:
                return
            engine, self._engine = self._engine, None
            engine.close()


_shared: dict[str, SharedEngine] = {}
_contexts: weakref.WeakKeyDictionary[BlendEngine, Contexts] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def shared_engine(key: str) -> SharedEngine:
    """Return what this process has under a key.

    Args:
        key: All that distinguishes one engine from another.
    """
    with _lock:
        return _shared.setdefault(key, SharedEngine())


def contexts_of(engine: BlendEngine) -> Contexts:
    """Return what is known about the contexts of an engine that a user has made."""
    with _lock:
        return _contexts.setdefault(engine, Contexts())


class Lease:
    """One LangChain object's claim to a shared engine; its copies hold the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lease":
        """Share: a copy must not count as another user."""
        return self


@lru_cache(maxsize=8)
def read_tokenizer(model: str) -> Any:
    """Read a model's tokenizer, without its weights.

    Args:
        model: Folder or hub id.

    Raises:
        OSError: There is no such model.
    """
    return AutoTokenizer.from_pretrained(model)
