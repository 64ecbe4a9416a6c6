"""Scattered rows as sequences that vLLM's kernels know: virtual requests.

Paged attention gives the last query of a sequence its last key, the one before the one before, and so on. A run of
adjacent rows is therefore a sequence of its own that ends where the run ends and shares the block table of its prompt:
each row then sees exactly the positions up to its own, since a layer writes all fresh rows before it attends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_blend.plan import Positions

Int32 = npt.NDArray[np.int32]


class VirtualRequests(NamedTuple):
    """Rows of one prompt, cut into runs.

    Attributes:
        positions: The rows, run by run, shape (num_rows,).
        query_starts: Where each run begins among them, and their number, shape (num_runs + 1,).
        seq_lens: One past each run's last position, shape (num_runs,).
    """

    positions: Positions
    query_starts: Int32
    seq_lens: Int32

    @classmethod
    def of(cls, positions: Positions) -> VirtualRequests:
        """Cut rows, ascending and at least one, into runs; the shortest first, as kernels want decodes."""
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        runs.sort(key=len)
        return cls(
            positions=np.concatenate(runs),
            query_starts=np.cumsum([0, *map(len, runs)], dtype=np.int32),
            seq_lens=np.array([run[-1] + 1 for run in runs], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.seq_lens)
