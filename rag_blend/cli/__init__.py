"""The command line: ``rag-blend``, one file per group of commands."""

from __future__ import annotations

import typer

from rag_blend.cli.bench import bench

app = typer.Typer(
    help="Retrieved text is prefilled once, when it is indexed, and not again for every question.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


@app.callback()
def _root() -> None:
    """Keeps `bench` a command of its own, however few others there are."""


def main() -> None:
    """Run the command line; the entry point of ``rag-blend``."""
    app()


__all__ = ["app", "main"]
