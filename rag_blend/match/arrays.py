"""Pure functions of numpy arrays: token ids in, fingerprints out, and the small tools the package shares."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
UInt8 = npt.NDArray[np.uint8]

_T = TypeVar("_T", bound=np.generic)

# Largest token id accepted (ids are compared as int32).
_MAX_ID = 2**31 - 1
# Fixed seed: fingerprints depend on the ids only, so runs can be compared.
_SEED = 240516444


def as_ids(token_ids: npt.ArrayLike) -> Int32:
    """Token ids as an int32 array of shape (n,)."""
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() > _MAX_ID:
        raise ValueError(f"token ids must lie in 0 .. {_MAX_ID}, got {ids.min()} .. {ids.max()}")
    return ids.astype(np.int32, copy=False)


# --- fingerprints ---------------------------------------------------------------------------------


def strides(tokens: Int64, window: int) -> Int64:
    """Tokens between two fingerprints of a chunk, for chunks of these lengths, shape (n,).

    Short chunks are fingerprinted more finely, so that a few tokens changed at an edge do not hide them.
    """
    short = np.where(np.less(tokens, 4 * window), max(1, window // 4), window)
    return np.where(np.less(tokens, 2 * window), 1, short)


def fingerprints(tokens: Int64, window: int) -> tuple[Int64, Int64]:
    """Which windows are indexed of chunks of these lengths, shape (chunks,); the last full one always is.

    Returns:
        Chunk and offset in it of each window, both of shape (n,), ascending.
    """
    last, stride = tokens - window, strides(tokens, window)
    counts = np.where(last < 0, 0, -(-last // stride) + 1)
    chunks = np.repeat(np.arange(tokens.size), counts)
    steps = ranges(np.zeros_like(counts), counts)
    return chunks, np.minimum(steps * stride[chunks], last[chunks])


def window_hashes(ids: Int32, starts: Int64, coefficients: UInt64) -> UInt64:
    """Hashes, shape (n,), of the windows beginning at `starts`, each as long as there are coefficients."""
    return row_hashes(ids.astype(np.uint64)[starts[:, None] + np.arange(coefficients.size)], coefficients)


def row_hashes(values: UInt64, coefficients: UInt64) -> UInt64:
    """Hashes, shape (n,), of the rows of `values`, shape (n, k): multilinear mod 2**64, then mixed."""
    return _mixed((values * coefficients).sum(axis=1, dtype=np.uint64))


def odd_numbers(count: int) -> UInt64:
    """Random odd 64-bit numbers, shape (count,), always the same: coefficients for hashes."""
    numbers = np.random.default_rng(_SEED).integers(0, 2**64, size=count, dtype=np.uint64)
    return numbers | np.uint64(1)


def _mixed(values: UInt64) -> UInt64:
    """The splitmix64 finaliser: every bit of the input reaches every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# --- tools ----------------------------------------------------------------------------------------


def ranges(starts: Int64, counts: Int64) -> Int64:
    """The integers start, start + 1, ... (count of them) for each pair, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if ends.size else 0)


def runs(flags: Bool, shortest: int) -> list[tuple[int, int]]:
    """Maximal stretches of True, as (start, stop), of at least `shortest`."""
    padded = np.zeros(flags.size + 2, np.int8)
    padded[1:-1] = flags
    edges = np.flatnonzero(np.diff(padded))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= shortest
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def with_room(array: npt.NDArray[_T], used: int, needed: int) -> npt.NDArray[_T]:
    """The array if `needed` rows fit, else a copy of its first `used` rows with a quarter more capacity."""
    if needed <= array.shape[0]:
        return array
    larger = np.empty((max(needed, used + used // 4 + 16), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
