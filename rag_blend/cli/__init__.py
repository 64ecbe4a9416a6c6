"""The command line: ``rag-blend``, one file per command or group of commands."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from rag_blend.cli.ask import ask
from rag_blend.cli.bench import bench
from rag_blend.cli.calibrate import calibrate
from rag_blend.cli.chat import chat
from rag_blend.cli.demo import demo
from rag_blend.cli.doctor import doctor
from rag_blend.cli.estimate import estimate
from rag_blend.cli.explain import explain
from rag_blend.cli.ingest import ingest
from rag_blend.cli.store import store

app = typer.Typer(
    help="Retrieved text is prefilled once, when it is indexed, and not again for every question.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: "storage" if name == "store" else name},  # its old name
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rag_blend import __version__

        typer.echo(f"rag-blend {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


for command in (demo, estimate, ingest, ask, chat, explain, doctor, calibrate):
    app.command()(command)
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; the entry point of ``rag-blend``."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # what is read is small, and threads are for the model
    # Before others do: wordllama and LlamaIndex's readers set up logging for the whole process when they are imported.
    logging.basicConfig(level=logging.WARNING, format="rag-blend: %(message)s")
    app()


__all__ = ["app", "main"]
