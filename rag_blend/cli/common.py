"""What the commands share: their options, a model, cases, and how a mistake is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_blend.errors import RagBlendError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rag_blend.evaluation import Case

TASKS = ("unanswerable", "copy", "lookup")
_DTYPES = ("float32", "bfloat16", "float16")

ModelOption = Annotated[Path, typer.Option("--model", help="Directory of a Hugging Face model.", metavar="DIR")]
DataOption = Annotated[
    list[Path], typer.Option("--data", help="JSON lines of cases or articles; may be repeated.", metavar="FILE")
]
PassagesOption = Annotated[
    int | None, typer.Option("--passages", min=1, help="Passages per prompt; default: what the file has, or 10.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help=f"What the model computes in: {', '.join(_DTYPES)}.")]
OwnDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="What the model computes in; default: as the engine.")
]
PrimeOption = Annotated[str | None, typer.Option("--prime", help="As the engine has it, like the next two.")]
PrimeTokensOption = Annotated[int | None, typer.Option("--prime-tokens", min=0)]
PrimeTextsOption = Annotated[int | None, typer.Option("--prime-texts", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def user_errors(extra: str | None = None) -> Iterator[None]:
    """What a user can do something about becomes one line and exit status 2; anything else is a bug and says where.

    Args:
        extra: What to install when a module is missing whose own error does not say so.
    """
    try:
        yield
    except (RagBlendError, OSError, ValueError) as error:
        complaint = str(error)
    except ModuleNotFoundError as error:
        complaint = str(error)
        if "pip install" not in complaint:
            if extra is None:
                raise
            complaint += f': pip install "rag-blend[{extra}]"'
    else:
        return
    typer.echo(f"rag-blend: {' '.join(complaint.split())}", err=True)
    raise typer.Exit(2)


def given(**options: Any) -> dict[str, Any]:
    """Those that were given; what the others are is the engine's own affair."""
    return {name: value for name, value in options.items() if value is not None}


def task_names(text: str) -> list[str]:
    """The names in a list separated by commas.

    Raises:
        ValueError: One of them is no task.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return names


def read_cases(
    data: Sequence[Path], limit: int, passages: int | None, tasks: Sequence[str], shuffle: bool, seed: int
) -> list[Case]:
    """The files' cases, each file's derived ones behind them, made-up ones last.

    Raises:
        ValueError: A file is malformed.
        OSError: One cannot be read.
    """
    from dataclasses import replace

    from rag_blend.evaluation import copy_cases, load_cases, lookup_cases, shuffled, unanswerable

    cases: list[Case] = []
    for path in data:
        own = load_cases(path, limit, passages)
        if shuffle:
            own = [shuffled(case, seed) for case in own]
        cases += own
        if "unanswerable" in tasks:
            # Where all passages are supporting, or none is marked, there is nothing to leave out or to be left.
            cases += [unanswerable(case) for case in own if len({p.supporting for p in case.passages}) == 2]
        if "copy" in tasks:
            collection = [passage for case in own for passage in case.passages]
            copied = copy_cases(collection, limit, seed, passages or 8)
            cases += [replace(case, dataset=own[0].dataset) for case in copied]
    if "lookup" in tasks:
        cases += lookup_cases(limit, passages or 8, seed)
    return cases


def load_model(path: Path, dtype: str | None) -> tuple[Any, Any]:
    """Model and tokenizer from a directory; without a dtype, as `BlendEngine.from_pretrained` loads them.

    Raises:
        ValueError: The dtype is none of those that models compute in.
        OSError: There is no such model.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no model directory {str(path)!r}")
    checked_dtype(dtype)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from rag_blend.loading import load

    disable_progress_bar()  # of loading weights: noise between our own
    return load(path, dtype=getattr(torch, dtype) if dtype else None)


def checked_dtype(dtype: str | None) -> str | None:
    """The same name.

    Raises:
        ValueError: It is none of those that models compute in.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    return dtype


def console_of() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for a file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160  # nobody resizes a file
    return console


def table_with(title: str | None, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column says what the others, numbers, are of."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    return table
