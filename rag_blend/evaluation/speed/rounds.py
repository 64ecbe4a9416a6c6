"""Rounds of measurements, kept on disk one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rag_blend.chunk import digest_json

Samples = list[dict[str, Any]]
Round = Callable[[int], Samples]  # measures the round of this number


def run_rounds(
    directory: Path, configuration: Any, rounds: int, prepare: Callable[[ExitStack], Round], progress: bool
) -> Samples:
    """The samples of all rounds: those that are kept, and the others measured now.

    Args:
        directory: Where rounds are kept, a file each. Those of another configuration are never mixed in.
        configuration: Whatever samples depend on besides the number of their round, as JSON-like data.
        rounds: How many there are.
        prepare: Called if any is missing; gives what measures it, and may leave to the stack what must end with it.
        progress: Show a progress bar.

    Raises:
        OSError: The directory cannot be used.
    """
    kept = directory / f"rounds-{digest_json(configuration)[:16]}"
    kept.mkdir(parents=True, exist_ok=True)
    paths = [kept / f"{number}.json" for number in range(rounds)]
    if not all(path.exists() for path in paths):
        with ExitStack() as stack:
            measure = prepare(stack)
            for number, path in enumerate(tqdm(paths, desc="rounds", disable=not progress)):
                if not path.exists():
                    _write(path, measure(number))
    return [sample for path in paths for sample in json.loads(path.read_text("utf-8"))]


def _write(path: Path, samples: Samples) -> None:
    whole = path.with_suffix(".tmp")
    whole.write_text(json.dumps(samples), encoding="utf-8")
    os.replace(whole, path)  # a round is there in full or not at all
