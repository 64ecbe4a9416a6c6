"""How alike token sequences are: whether a chunk repeats a text, itself, or the end of what stands in front of it."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

SHARED_RUN = 16  # a chunk that shares so many consecutive tokens with a priming text is not primed with it
_OVERLAP_RUN = 8  # tokens by which an overlap is recognised
_GRAM = 4
_MIN_DISTINCT_GRAMS = 0.7  # prose is above 0.9
_MAX_SHARED_GRAMS = 0.15  # of a chunk with a text that may prime it: prose of one collection shares under 5 %


class PrimingText:
    """A priming text that can tell whether a chunk repeats it.

    A chunk primed with its own likeness (a neighbour of the same table, form or boilerplate) copies from the priming
    text, which then is not there in the prompt.
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self._runs = set(_grams(token_ids, SHARED_RUN))
        self._grams = set(_grams(token_ids, _GRAM))

    def resembles(self, chunk: np.ndarray) -> bool:
        """Whether they share a long run, or many short ones."""
        if not self._runs.isdisjoint(_grams(chunk, SHARED_RUN)):
            return True
        grams = _grams(chunk, _GRAM)
        return sum(gram in self._grams for gram in grams) > _MAX_SHARED_GRAMS * len(grams)


def is_varied(chunk: np.ndarray) -> bool:
    """Whether a chunk is more than one pattern over and over (tables, numbered items)."""
    grams = _grams(chunk, _GRAM)
    return len(set(grams)) >= _MIN_DISTINCT_GRAMS * len(grams)


def without_overlap(before: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """What stands in front of a chunk, without the part that the chunk itself begins with (splitters' overlap)."""
    start = chunk[1 : 1 + _OVERLAP_RUN]  # the very first token may be another one at the edge of a text
    if len(start) < _OVERLAP_RUN or len(before) < _OVERLAP_RUN:
        return before
    found = np.flatnonzero((sliding_window_view(before, _OVERLAP_RUN) == start).all(axis=1))
    return before[: max(0, int(found[-1]) - 1)] if len(found) else before


def _grams(ids: np.ndarray, length: int) -> list[bytes]:
    return [ids[i : i + length].tobytes() for i in range(len(ids) - length + 1)]
