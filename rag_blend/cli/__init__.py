"""The command line: ``rag-blend``, one file per command or group of commands."""

from __future__ import annotations

import typer

from rag_blend.cli.bench import bench
from rag_blend.cli.calibrate import calibrate
from rag_blend.cli.doctor import doctor
from rag_blend.cli.store import store

app = typer.Typer(
    help="Retrieved text is prefilled once, when it is indexed, and not again for every question.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(store, name="store")
app.command()(calibrate)
app.command()(doctor)


def main() -> None:
    """Run the command line; the entry point of ``rag-blend``."""
    app()


__all__ = ["app", "main"]
