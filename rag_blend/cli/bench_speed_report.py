"""``rag-blend bench report``: one page of all that was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rag_blend.cli.common import user_errors


def report(
    directories: Annotated[
        list[Path], typer.Argument(help="The --out directories of benches, and of peers.", metavar="DIR...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the page here, with plots in images beside it.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print sections, their files and what was written, as JSON.")
    ] = False,
) -> None:
    """Put the results of ttft, pipeline, control, throughput, ingest, match and of peers together, in Markdown.

    Example: rag-blend bench report speed --out docs/benchmarks.md
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.page import page_of, read_results, write_page

        results = read_results(directories)
        written = [] if out is None else write_page(results, out)
        if as_json:
            sections = [{"title": title, "files": [str(file) for file in files]} for title, files in results.sections()]
            page = page_of(results) if out is None else None
            typer.echo(json.dumps({"sections": sections, "written": [str(path) for path in written], "page": page}))
        elif out is None:
            typer.echo(page_of(results), nl=False)
        else:
            typer.echo(str(out))
