"""Where entries live. The module's name is the scheme of its storage URL: one file makes one more backend."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rag_blend.storage.base import EntryReader, StorageBackend, StorageStats

__all__ = ["EntryReader", "StorageBackend", "StorageStats", "directory_of", "open_storage"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9_+.-]*)://(.*)", re.DOTALL)
_KNOWN = "use a directory, memory://, redis:// or an object store such as s3://"
# Schemes whose backend has another name; it is given the whole URL, since the scheme tells it something.
_ALIASES = {
    **dict.fromkeys(("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"), "object_store"),
    **dict.fromkeys(("rediss", "valkey", "valkeys"), "redis"),
}

Place = str | os.PathLike[str] | StorageBackend


def open_storage(where: Place | Sequence[Place] | None) -> StorageBackend:
    """Open a storage backend.

    Args:
        where: A directory, a URL (``"disk://kv"``, ``"memory://"``), a backend, a list of these for several tiers, the
            nearest first, or None for memory.

    Raises:
        ValueError: The URL's scheme has no backend here, or the backend cannot use the rest of it.
    """
    if isinstance(where, Sequence) and not isinstance(where, str):
        return _open_tiers(where)
    if isinstance(where, StorageBackend):
        return where
    url = "memory://" if where is None else os.fspath(where)
    found = _URL.fullmatch(url)
    if found is None:
        return _directory(url)
    scheme, rest = found[1].lower(), found[2]
    if scheme in _ALIASES:
        scheme, rest = _ALIASES[scheme], url
    if scheme == "base" or not scheme.isidentifier():
        raise ValueError(f"no storage backend for {found[1]}:// URLs")  # the rest may hold a password
    try:
        module = importlib.import_module(f"rag_blend.storage.{scheme}")
    except ModuleNotFoundError as error:
        if error.name != f"rag_blend.storage.{scheme}":
            raise
        raise ValueError(f"no storage backend for {found[1]}:// URLs: {_KNOWN}") from None
    backend = getattr(module, f"{scheme.title().replace('_', '')}Backend")
    return cast(StorageBackend, backend.from_url(rest))


def directory_of(where: str) -> Path | None:
    """The directory that `open_storage` would make; None if a URL keeps its entries elsewhere.

    Raises:
        ValueError: It is a `disk://` URL without a directory, or with an unknown option.
    """
    found = _URL.fullmatch(where)
    if found is None:
        return Path(where).expanduser()
    if found[1].lower() != "disk":
        return None
    from rag_blend.storage.disk import directory_and_quota

    return directory_and_quota(found[2])[0]


def _directory(path: str) -> StorageBackend:
    if not path or "://" in path:
        raise ValueError(f"neither a directory nor the URL of a storage backend: {_KNOWN}")
    from rag_blend.storage.disk import DiskBackend

    return DiskBackend(path)  # whatever the path looks like, it has no options


def _open_tiers(places: Sequence[Place]) -> StorageBackend:
    from rag_blend.storage.tiered import TieredBackend

    with contextlib.ExitStack() as opened:  # closed again if a later one cannot be opened
        tiers = []
        for place in places:
            tiers.append(open_storage(place))
            if tiers[-1] is not place:
                opened.callback(tiers[-1].close)
        backend = TieredBackend(tiers)
        opened.pop_all()
    return backend
