"""What the commands share: their options, a model, cases, and how a mistake is told."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rag_blend_app.terminal import printable

from rag_blend.cli.models import model_directory
from rag_blend.errors import RagBlendError, install_hint

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rag_blend.evaluation import Case

TASKS = ("unanswerable", "copy", "lookup")
_DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("cpu", "cuda")  # another GPU than the first: CUDA_VISIBLE_DEVICES

ModelOption = Annotated[Path, typer.Option("--model", help="A Hugging Face model's directory, or demo.", metavar="DIR")]
DataOption = Annotated[
    list[Path], typer.Option("--data", help="JSON lines of cases or articles; may be repeated.", metavar="FILE")
]
PassagesOption = Annotated[
    int | None, typer.Option("--passages", min=1, help="Passages per prompt; default: what the file has, or 10.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help=f"What the model computes in: {', '.join(_DTYPES)}.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help=f"Where the model computes: {', '.join(_DEVICES)}; default: cuda where there is one."
    ),
]
OwnDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="What the model computes in; default: as the engine.")
]
PrimeOption = Annotated[str | None, typer.Option("--prime", help="As the engine has it, like the next three.")]
PrimeTokensOption = Annotated[int | None, typer.Option("--prime-tokens", min=0)]
PrimeTextsOption = Annotated[int | None, typer.Option("--prime-texts", min=0)]
ExactFirstOption = Annotated[bool | None, typer.Option("--exact-first/--no-exact-first")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def user_errors(extra: str | None = None, resumes: bool = False, arguments: Collection[str] = ()) -> Iterator[None]:
    """What a user can do something about becomes one line and exit status 2; anything else is a bug and says where.

    Ctrl-C becomes a line and exit status 130, which is what shells expect of it.

    Args:
        extra: What to install when a module is missing whose own error does not say so.
        resumes: Whether a command that was interrupted goes on where it was when it is run again.
        arguments: Python's names of options that the command has, where errors advise to use them.
    """
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted" + ("; run the same command again, it resumes" if resumes else ""))
        raise typer.Exit(130) from None
    except (RagBlendError, OSError, ValueError) as error:
        complaint = _with_options(str(error), arguments)
    except ModuleNotFoundError as error:
        complaint = str(error)
        if "pip install" not in complaint:
            if extra is None:
                raise
            complaint += f"; {install_hint(extra)}"
    else:
        return
    complain(complaint)
    raise typer.Exit(2)


def _with_options(complaint: str, arguments: Collection[str]) -> str:
    """Arguments as somebody at a shell writes them: from `on_unsupported='full'` to `--on-unsupported full`."""
    for name in arguments:
        complaint = re.sub(rf"\b{name}='(\w+)'", rf"--{name.replace('_', '-')} \1", complaint)
    return complaint


def complain(about: str) -> None:
    """A line on standard error; file names and what is quoted from files may hold anything."""
    typer.echo(f"rag-blend: {printable(' '.join(about.split()))}", err=True)


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
    data: Sequence[Path],
    limit: int,
    passages: int | None,
    tasks: Sequence[str] = (),
    shuffle: bool = False,
    seed: int = 0,
    join: int = 1,
) -> list[Case]:
    """The files' cases, each file's derived ones behind them, made-up ones last.

    Raises:
        ValueError: A file is malformed.
        OSError: One cannot be read.
    """
    from dataclasses import replace

    from rag_blend.evaluation import copy_cases, joined, load_cases, lookup_cases, shuffled, unanswerable

    cases: list[Case] = []
    for path in data:
        own = load_cases(path, limit, passages)
        if shuffle:
            own = [shuffled(case, seed) for case in own]
        if join > 1:
            own = [joined(case, join) for case in own]
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


def load_model(path: Path, dtype: str | None, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer from a directory; without dtype or device, as `BlendEngine.from_pretrained` loads them.

    Raises:
        ValueError: The dtype is none of those that models compute in, or there is no such device.
        OSError: There is no such model.
    """
    checked_dtype(dtype)
    checked_device(device)
    path = model_directory(path)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from rag_blend.loading import load

    disable_progress_bar()  # of loading weights: noise between our own
    return load(path, device, getattr(torch, dtype) if dtype else None)


def checked_dtype(dtype: str | None) -> str | None:
    """The same name.

    Raises:
        ValueError: It is none of those that models compute in.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    return dtype


def checked_device(device: str | None) -> str | None:
    """The same name.

    Raises:
        ValueError: It is none of those that models compute on, or torch finds no such device here.
    """
    if device is not None and device not in _DEVICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(_DEVICES)}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                f"torch {torch.__version__} finds no CUDA device here: use --device cpu, or install the driver and the "
                "build of torch that fit the GPU"
            )
    return device


def expect_store(storage: str) -> None:
    """Opening a store would make one.

    Raises:
        FileNotFoundError: It is a directory that does not exist.
    """
    from rag_blend.storage import directory_of

    directory = directory_of(storage)
    if directory is not None and not directory.is_dir():
        raise FileNotFoundError(f"there is no store {storage!r}")


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
