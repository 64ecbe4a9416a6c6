"""How much memory this process has taken at most."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")


def forget_peak() -> bool:
    """Begin to look for the peak anew; returns whether that is possible here (Linux)."""
    try:
        (_PROCESS / "clear_refs").write_text("5")  # see proc(5)
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most memory that was resident since `forget_peak`.

    Raises:
        OSError: This system does not tell.
    """
    for line in (_PROCESS / "status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
