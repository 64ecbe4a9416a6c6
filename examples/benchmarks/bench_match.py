"""How long matching a prompt takes, and how much RAM the index needs.

    python examples/benchmarks/bench_match.py --chunks 100000 --chunk-tokens 512

The callback that gives a chunk's ids reads from one numpy table, so no storage is in the times. Every prompt
holds other chunks, put behind each other with a few fresh tokens between; each match is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import numpy.typing as npt

from rag_blend.match import ChunkIndex

GLUE_TOKENS = 8


def build(table: npt.NDArray[np.int32], window: int) -> tuple[ChunkIndex, float]:
    """An index of the table's rows, shape (chunks, chunk_tokens), and the seconds it took."""
    index = ChunkIndex(lambda key: table[int(key, 16)], window)
    start = time.perf_counter()
    for row, ids in enumerate(table):
        index.add(f"{row:064x}", ids)
    index.match(table[0])  # sorts what waits
    return index, time.perf_counter() - start


def make_prompt(
    table: npt.NDArray[np.int32], tokens: int, vocabulary: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """A prompt of `tokens` ids and the rows that stand in it whole; the glue is outside the vocabulary."""
    parts: list[npt.NDArray[np.int32]] = []
    rows: list[int] = []
    free = tokens
    while free >= table.shape[1] + GLUE_TOKENS:
        rows.append(int(rng.integers(len(table))))
        glue = rng.integers(vocabulary, 2 * vocabulary, GLUE_TOKENS, dtype=np.int32)
        parts += [glue, table[rows[-1]]]
        free -= table.shape[1] + GLUE_TOKENS
    parts.append(rng.integers(vocabulary, 2 * vocabulary, free, dtype=np.int32))
    return np.concatenate(parts), rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000, help="chunks in the index")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="tokens of each chunk")
    parser.add_argument("--prompt-tokens", type=int, default=8_000, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=30, help="prompts matched")
    parser.add_argument("--vocabulary", type=int, default=128_000, help="distinct ids in chunks")
    parser.add_argument("--shared-tokens", type=int, default=0, help="boilerplate heading every chunk")
    parser.add_argument("--window", type=int, default=16, help="tokens a fingerprint covers")
    parser.add_argument("--seed", type=int, default=0, help="for the random ids")
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    table = rng.integers(0, args.vocabulary, (args.chunks, args.chunk_tokens), dtype=np.int32)
    table[:, : args.shared_tokens] = table[0, : args.shared_tokens]
    index, build_seconds = build(table, args.window)

    times = []
    covered = 0
    for _ in range(args.repeats):
        prompt, rows = make_prompt(table, args.prompt_tokens, args.vocabulary, rng)
        start = time.perf_counter()
        matches = index.match(prompt)
        times.append((time.perf_counter() - start) * 1000)
        whole = [int(match.key, 16) for match in matches if match.edge_tokens == 0]
        if whole != rows:
            raise SystemExit(f"planted {len(rows)} chunks, found {len(whole)} of them whole")
        covered = sum(match.length for match in matches)

    print(f"{args.chunks:,} chunks of {args.chunk_tokens} tokens, prompts of {args.prompt_tokens:,} tokens")
    print(
        f"match: median {statistics.median(times):.1f} ms, min {min(times):.1f}, max {max(times):.1f}"
        f" ({args.repeats} prompts; {covered} tokens covered by {len(rows)} chunks in the last)"
    )
    print(
        f"index: {index.nbytes * 64 / (args.chunks * args.chunk_tokens):.1f} bytes per 64 tokens,"
        f" {index.nbytes / 2**20:.1f} MiB, built in {build_seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
