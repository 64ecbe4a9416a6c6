"""Which cores a benchmark may use."""

from __future__ import annotations

import os
import sys


def confine(threads: int) -> None:
    """Let this process, and so everything that it starts, use the same few cores."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(cores):
        sys.exit(f"--threads must be from 1 to {len(cores)}, the cores there are, not {threads}")
    os.sched_setaffinity(0, cores[:threads])
