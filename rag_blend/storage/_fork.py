"""Locks and threads do not survive a fork: what has some is made usable again in the child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something with locks or threads of its own."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs; any lock may have been held by one that is gone."""


_KNOWN: weakref.WeakSet[Forkable] = weakref.WeakSet()


def repair_after_fork(this: Forkable) -> None:
    """Have `this.after_fork` called in every process that is forked off while `this` is in use."""
    _KNOWN.add(this)


def _repair() -> None:
    for this in list(_KNOWN):
        this.after_fork()


os.register_at_fork(after_in_child=_repair)
