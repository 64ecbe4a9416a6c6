"""``rag-blend bench store``: how fast storage is, beside plain files."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rag_blend.cli.common import JsonOption, console_of, table_with, user_errors


def store(
    storage: Annotated[
        list[str] | None,
        typer.Option(help="plain, disk (both below the current directory), or a URL; may be repeated."),
    ] = None,
    counts: Annotated[str, typer.Option(help="Numbers of entries to fill it up to.")] = "100,1000,10000",
    entry: Annotated[str, typer.Option(help="Size of an entry: 64KiB, 12MB, ...")] = "64KiB",
    as_json: JsonOption = False,
) -> None:
    """Write, read, open and list entries of random bytes.

    Example: rag-blend bench store --storage plain --storage disk --storage redis://localhost/0
    """
    with user_errors():
        from tqdm import tqdm

        from rag_blend.evaluation.storage import as_json as as_data
        from rag_blend.evaluation.storage import measure_storage
        from rag_blend.sizes import parse_bytes

        numbers = sorted({int(number) for number in counts.split(",")})
        if not numbers or numbers[0] < 1:
            raise ValueError("counts must be positive")
        found = []
        for place in storage or ["plain", "disk"]:
            with tqdm(desc=place.partition("?")[0], total=numbers[-1], disable=as_json) as bar:
                found += measure_storage(place, numbers, parse_bytes(entry), bar.update)
        if as_json:
            typer.echo(json.dumps(as_data(found), indent=2))
            return
    header = ("storage", "entries", "write MB/s", "cold read MB/s", "warm read MB/s", "open ms", "list all s")
    rows = (
        (
            speed.storage,
            str(speed.entries),
            f"{speed.write_mb_s:.0f}",
            "-" if speed.cold_mb_s is None else f"{speed.cold_mb_s:.0f}",
            f"{speed.warm_mb_s:.0f}",
            f"{speed.open_ms:.3f}",
            f"{speed.list_s:.3f}",
        )
        for speed in found
    )
    console_of().print(table_with(None, header, rows))
