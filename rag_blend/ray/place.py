"""The one place that all workers write to."""

from __future__ import annotations

import os


def shared_place(storage: str | os.PathLike[str]) -> str:
    """The storage as every process of this user may name it: a relative directory becomes absolute.

    Whether all nodes reach it, nobody can tell from here.

    Raises:
        TypeError: It is no directory or URL: an open backend, or several tiers.
        ValueError: It cannot be shared.
    """
    if not isinstance(storage, str | os.PathLike):
        raise TypeError(
            "storage must be one directory or URL that all nodes reach; of several tiers, name the one they share"
        )
    place = os.fspath(storage)
    scheme, mark, rest = place.partition("://")
    if not mark:
        return _absolute(place)
    if scheme.lower() == "memory":
        raise ValueError(
            "memory:// belongs to one process, and workers are several: use a directory that all nodes share, "
            "redis://HOST or s3://BUCKET/PREFIX"
        )
    return f"{scheme}://{_absolute(rest)}" if scheme.lower() == "disk" else place


def _absolute(directory: str) -> str:
    return os.path.join(os.getcwd(), os.path.expanduser(directory))
