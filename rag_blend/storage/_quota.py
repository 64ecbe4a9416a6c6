"""How much a directory may hold when nobody says."""

from __future__ import annotations

import os
import shutil


def default_quota(directory: str | os.PathLike[str], held: int) -> int:
    """Half of the space that is free, where the `held` bytes that the files take up already count as free.

    So it does not shrink while they grow, two directories on one disk do not fill it, and what others need is yielded
    at the next start.
    """
    return (shutil.disk_usage(directory).free + held) // 2
