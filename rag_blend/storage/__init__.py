"""Where entries live. The module's name is the scheme of its storage URL: one file makes one more backend."""

from __future__ import annotations

import importlib
import os
import re
from typing import cast

from rag_blend.storage.base import EntryReader, StorageBackend, StorageStats

__all__ = ["EntryReader", "StorageBackend", "StorageStats", "open_storage"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9_+.-]*)://(.*)", re.DOTALL)


def open_storage(where: str | os.PathLike[str] | StorageBackend | None) -> StorageBackend:
    """Open a storage backend.

    Args:
        where: A directory, a URL (``"disk://kv"``, ``"memory://"``), a backend, or None for memory.

    Raises:
        ValueError: The URL's scheme has no backend here, or the backend cannot use the rest of it.
    """
    if isinstance(where, StorageBackend):
        return where
    url = "memory://" if where is None else os.fspath(where)
    found = _URL.fullmatch(url)
    scheme, rest = (found[1].lower(), found[2]) if found else ("disk", url)
    if scheme == "base" or not scheme.isidentifier():
        raise ValueError(f"no storage backend for {url!r}")
    try:
        module = importlib.import_module(f"rag_blend.storage.{scheme}")
    except ModuleNotFoundError as error:
        if error.name != f"rag_blend.storage.{scheme}":
            raise
        raise ValueError(f"no storage backend for {url!r}: use a directory or memory://") from None
    backend = getattr(module, f"{scheme.title().replace('_', '')}Backend")
    return cast(StorageBackend, backend.from_url(rest))
