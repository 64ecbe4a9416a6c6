"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """A size in bytes: ``"20GB"`` (10^9 each), ``"512 MiB"`` (2^20 each), ``"1.5tb"`` or plain ``"1000000"``.

    Raises:
        ValueError: It is none, or nothing.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"not a size: {text!r}; write 20GB, 512MiB or a number of bytes")
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    size = int(Decimal(found[1]) * (1024 if found[3] else 1000) ** power)
    if size < 1:
        raise ValueError(f"not a size that anything fits into: {text!r}")
    return size


def format_bytes(size: float) -> str:
    """The same for people: ``"20.0 GB"``."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
