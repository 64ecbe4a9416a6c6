"""``rag-blend demo``: real documents, six questions, each answered four ways."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rag_blend.cli.common import user_errors
from rag_blend.cli.models import DEMO, model_directory


def demo(
    documents: Annotated[
        Path | None,
        typer.Option(
            envvar="DOCS",
            metavar="DIR",
            help="Your own .txt, .md and .rst files; default: a part of the Python language reference.",
        ),
    ] = None,
    model: Annotated[Path, typer.Option(metavar="DIR", help="A model; demo: SmolLM2-135M-Instruct.")] = Path(DEMO),
    storage: Annotated[Path, typer.Option(metavar="DIR", help="Where KV caches live.")] = Path(".demo/kv"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """See how much faster blending is: full prefill, CacheBlend as published, and two of our policies, side by side.

    Run it twice: the second time, nothing is prefilled at the start. Example: rag-blend demo --documents docs/
    """
    started = time.perf_counter()
    with user_errors("demo", resumes=True):
        from rag_blend_app.demo import medians, run
        from rich.console import Console
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        console = Console(width=100, quiet=as_json)
        rows = run(model_directory(model), documents, storage, console)
        if as_json:
            answers = [
                {name: {"text": a.generation.text, **asdict(a.generation.stats)} for name, a in row.items()}
                for row in rows
            ]
            typer.echo(json.dumps({"medians": medians(rows), "answers": answers}))
        console.print(f"{time.perf_counter() - started:.0f} s in all")
