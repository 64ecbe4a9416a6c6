"""The GPU, where one is in use: waiting for it, and how much of its memory was taken. Elsewhere nothing is done."""

from __future__ import annotations

import torch


def wait() -> None:
    """Return when all that was begun there is done, on any stream."""
    if _in_use():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Begin to look for the peak anew."""
    if _in_use():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """The most memory that tensors took there since `forget_peak`; None without a GPU."""
    return torch.cuda.max_memory_allocated() if _in_use() else None


def _in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
