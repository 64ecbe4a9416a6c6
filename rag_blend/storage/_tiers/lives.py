"""Whether what is under way for a key is still wanted, and who may touch its entry in the near tiers."""

from __future__ import annotations

import threading
import weakref

from rag_blend.storage._fork import repair_after_fork

_STRIPES = 64


class Life:
    """From one write or deletion of a key in this process to the next.

    Attributes:
        is_over: The key has been deleted, set aside or written anew: what belongs to this life must not be stored.
        is_deleted: It is over, and not because the key was written anew: what has been stored must go.
    """

    __slots__ = ("__weakref__", "is_deleted", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self.is_deleted = False


class Lives:
    """The current life of every key for which something is under way, and a lock for each key.

    A life is remembered only as long as somebody holds it, so this does not grow with the number of keys.
    """

    def __init__(self) -> None:
        self.after_fork()
        repair_after_fork(self)

    def after_fork(self) -> None:
        """See `Forkable`. What was under way is carried on by the process that began it."""
        self._lock = threading.Lock()
        self._current: weakref.WeakValueDictionary[str, Life] = weakref.WeakValueDictionary()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def current(self, key: str) -> Life:
        """The life that goes on now; keep it to learn when it ends."""
        with self._lock:
            life = self._current.get(key)
            if life is None:
                life = self._current[key] = Life()
            return life

    def end(self, key: str) -> None:
        """The key is deleted: what began before this moment is not wanted any more."""
        self._end(key, is_deleted=True)

    def renewed(self, key: str) -> Life:
        """The key is written anew: what began before is not wanted any more; the life that begins now."""
        self._end(key, is_deleted=False)
        return self.current(key)

    def lock(self, key: str) -> threading.Lock:
        """Held while the entry in the near tiers is written or removed; some other keys share it."""
        return self._stripes[int(key[:2], 16) % _STRIPES]

    def _end(self, key: str, is_deleted: bool) -> None:
        with self._lock:
            life = self._current.pop(key, None)
            if life is not None:
                life.is_deleted = is_deleted
                life.is_over = True
