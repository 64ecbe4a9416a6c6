"""Copies to an accelerator and the work on them run beside the model's, on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch


class CopyLane:
    """Where a reader thread works on a device. On a CPU there is one lane for all: nothing here does anything then.

    To be made by the thread that runs the model, which is the one that calls what `hand_over` returns.

    Args:
        device: The model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:  # what the reader works with, angles for one, must be there before it begins
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def working(self) -> contextlib.AbstractContextManager[object]:
        """Within it, this thread's work goes to the lane."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device; from pinned memory, so that nobody waits for the copy."""
        if self._stream is None or tensor.is_cuda:
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """To be called in the lane for finished tensors; what it returns, by the model's thread before it uses them.

        The model's stream then waits for the lane, without the processor having to; and their memory is not given to
        anybody else before the model is done with them.
        """
        if self._stream is None:
            return _nothing
        finished, kept = self._stream.record_event(), list(tensors)

        def take_over() -> None:
            user = torch.cuda.current_stream(self._device)
            user.wait_event(finished)
            for tensor in kept:
                tensor.record_stream(user)

        return take_over


def _nothing() -> None:
    return None
