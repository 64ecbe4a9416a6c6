"""The matching bench: how long finding stored chunks in a prompt takes, and how much memory their index needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from rag_blend.evaluation.environment import machine
from rag_blend.evaluation.speed.report import TIMES, TIMES_NOTE, Line, Panel, Row, Rows, SpeedReport, View, number
from rag_blend.evaluation.speed.timing import summary, timed
from rag_blend.match import ChunkIndex

GLUE_TOKENS = 8  # fresh tokens between two chunks


@dataclass(frozen=True, slots=True)
class Collection:
    """What is looked for, and in what.

    Attributes:
        chunk_tokens: Tokens of each chunk.
        prompt_tokens: Tokens of each prompt.
        vocabulary: Distinct ids in chunks.
        shared_tokens: Boilerplate that heads every chunk.
        window: Tokens that a fingerprint of the index covers.
        seed: Of the random ids.
    """

    chunk_tokens: int = 512
    prompt_tokens: int = 8_000
    vocabulary: int = 128_000
    shared_tokens: int = 0
    window: int = 16
    seed: int = 0


def measure_matching(counts: Sequence[int], collection: Collection, rounds: int, progress: bool = True) -> SpeedReport:
    """Fill an index with each number of chunks and match prompts that hold some of them.

    The callback that gives a chunk's ids reads from one table, so no storage is in the times. Every prompt holds other
    chunks, put behind each other with a few fresh tokens between.

    Args:
        counts: Numbers of chunks.
        collection: What they are.
        rounds: How many prompts are matched.
        progress: Show a progress bar.

    Raises:
        ValueError: A number is not positive, or a prompt has no room for a chunk.
        RuntimeError: A match was wrong.
    """
    if not counts or min(counts) < 1 or rounds < 1:
        raise ValueError("numbers of chunks and rounds must be positive")
    if collection.prompt_tokens < collection.chunk_tokens + GLUE_TOKENS:
        raise ValueError(f"prompts of {collection.prompt_tokens} tokens have no room for a chunk")
    rows = [_measured(count, collection, rounds) for count in tqdm(counts, desc="chunks", disable=not progress)]
    return SpeedReport(VIEW, machine(torch.device("cpu")), {**asdict(collection), "rounds": rounds}, rows)


def _measured(count: int, collection: Collection, rounds: int) -> Row:
    rng = np.random.default_rng(collection.seed)
    table = rng.integers(0, collection.vocabulary, (count, collection.chunk_tokens), dtype=np.int32)
    table[:, : collection.shared_tokens] = table[0, : collection.shared_tokens]
    index = ChunkIndex(lambda key: table[int(key, 16)], collection.window)
    built = timed(partial(_fill, index, table))
    wall_s, cpu_s, covered = [], [], 0
    for _ in range(rounds):
        prompt, planted = _make_prompt(table, collection, rng)
        run = timed(partial(index.match, prompt))
        whole = [int(match.key, 16) for match in run.value if match.edge_tokens == 0]
        if whole != planted:
            raise RuntimeError(f"planted {len(planted)} chunks, found {len(whole)} of them whole")
        covered += sum(match.length for match in run.value)
        wall_s.append(run.wall_s)
        cpu_s.append(run.cpu_s)
    times = summary(wall_s, cpu_s)
    return {
        "chunks": count,
        **times,
        "median_ms": times["median_s"] * 1e3,
        "covered": covered / (rounds * collection.prompt_tokens),
        "index_mb": index.nbytes / 1e6,
        "bytes_per_64": index.nbytes * 64 / (count * collection.chunk_tokens),
        "build_s": built.wall_s,
    }


def _fill(index: ChunkIndex, table: npt.NDArray[np.int32]) -> None:
    index.add_all((f"{row:064x}", ids) for row, ids in enumerate(table))
    index.match(table[0])  # sorts what waits


def _make_prompt(
    table: npt.NDArray[np.int32], collection: Collection, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """A prompt and the rows of the table that stand in it whole; the glue is outside the vocabulary."""
    glue = partial(rng.integers, collection.vocabulary, 2 * collection.vocabulary, dtype=np.int32)
    parts: list[Any] = []
    rows: list[int] = []
    free = collection.prompt_tokens
    while free >= table.shape[1] + GLUE_TOKENS:
        rows.append(int(rng.integers(len(table))))
        parts += [glue(GLUE_TOKENS), table[rows[-1]]]
        free -= table.shape[1] + GLUE_TOKENS
    return np.concatenate([*parts, glue(free)]), rows


def _milliseconds(row: Row) -> str:
    return f"{row['median_ms']:.2f} ({row['min_s'] * 1e3:.2f}-{row['max_s'] * 1e3:.2f})"


def _panels(rows: Rows) -> list[Panel]:
    counts = [row["chunks"] for row in rows]
    times = Line("match a prompt", counts, [row["median_ms"] for row in rows])
    sizes = Line("index", counts, [row["index_mb"] for row in rows])
    return [Panel("Matching", "stored chunks", "ms", [times]), Panel("Memory", "stored chunks", "MB", [sizes])]


VIEW = View(
    name="match",
    title="Matching",
    notes=f"""\
Random token ids. No storage is in the times; every match is checked. Covered: share of the prompts' tokens that chunks
cover. Built: seconds for adding all chunks, once.
{TIMES_NOTE}""",
    section=lambda row: "By number of stored chunks",
    columns=[
        ("chunks", number("chunks", ",d")),
        ("median ms (range)", _milliseconds),
        *TIMES[2:],
        ("covered", number("covered", ".1%")),
        ("index MB", number("index_mb", ",.1f")),
        ("bytes per 64 tokens", number("bytes_per_64", ".1f")),
        ("built s", number("build_s", ".1f")),
    ],
    panels=_panels,
)
