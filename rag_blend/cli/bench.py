"""``rag-blend bench``: measure quality against full prefill, and draw what reuse does to attention and KV caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_blend.errors import RagBlendError

if TYPE_CHECKING:
    from rag_blend.evaluation import Case, QualityReport

bench = typer.Typer(help="Measurements against full prefill.", no_args_is_help=True)

TASKS = ("unanswerable", "copy", "lookup")
_POLICIES = ("published", "reuse", "default")
_DTYPES = ("float32", "bfloat16", "float16")
# What fits a screen; quality.md has the rest.
_COLUMNS = (
    "KL",
    "KL / published",
    "agreement",
    "F1 - full",
    "verbatim",
    "recomputed",
    "TTFT",
    "median gain",
    "blended",
)

_Model = Annotated[Path, typer.Option("--model", help="Directory of a Hugging Face model.", metavar="DIR")]
_Data = Annotated[
    list[Path], typer.Option("--data", help="JSON lines of cases or articles; may be repeated.", metavar="FILE")
]
_Passages = Annotated[
    int | None, typer.Option("--passages", min=1, help="Passages per prompt; default: what the file has, or 10.")
]
_Dtype = Annotated[str, typer.Option("--dtype", help=f"What the model computes in: {', '.join(_DTYPES)}.")]


@bench.command()
def quality(
    model: _Model,
    data: _Data,
    limit: Annotated[int, typer.Option(min=1, help="Cases per file, and per further task.")] = 40,
    passages: _Passages = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="prime/selector[:ratio][,option=value], published, reuse, default; may be repeated."),
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Put the passages of each case in another order.")] = False,
    tasks: Annotated[str, typer.Option(help=f"More tasks, separated by commas: {', '.join(TASKS)}.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    storage: Annotated[
        Path | None, typer.Option(help="Where KV caches live; default: kv in --out.", metavar="DIR")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="For reports, plots and case results; a run resumes.", metavar="DIR")
    ] = Path("quality"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
    dtype: _Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of shuffling and made-up tasks.")] = 0,
) -> None:
    """Compare policies with full prefill: KL, agreement, F1, abstentions, copying, time to first token."""
    with _user_errors():
        from rag_blend.evaluation import Policy, QualityBench

        chosen = [Policy.parse(text) for text in policy or _POLICIES]
        cases = _cases(data, limit, passages, _task_names(tasks), shuffle, seed)
        loaded, tokenizer = _load(model, dtype)
        with QualityBench(loaded, tokenizer, storage or out / "kv", chosen, max_new_tokens, out) as measuring:
            measuring.prepare(cases, progress=not as_json)
            report = measuring.run(cases, progress=not as_json)
        written = [*report.write(out), *_plots(report, out)]
        if as_json:
            typer.echo(report.to_json(), nl=False)
        else:
            _show(report, written)


@bench.command()
def figures(
    model: _Model,
    data: _Data,
    limit: Annotated[int, typer.Option(min=1, help="Cases per file.")] = 8,
    passages: Annotated[int, typer.Option(min=1, help="Passages per prompt.")] = 8,
    out: Annotated[Path, typer.Option(help="Where the figures go.", metavar="DIR")] = Path("figures"),
    dtype: _Dtype = "float32",
) -> None:
    """Draw how KV caches and attention deviate from full prefill."""
    with _user_errors():
        from rag_blend.evaluation.figures import draw_figures

        cases = _cases(data, limit, passages, [], False, 0)
        loaded, tokenizer = _load(model, dtype)
        try:
            paths = draw_figures(loaded, tokenizer, cases, out)
        except ModuleNotFoundError as error:  # matplotlib's; the text says what to install
            raise RagBlendError(str(error)) from error
        for path in paths:
            typer.echo(str(path))


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """What a user can do something about becomes one line and exit status 2; anything else is a bug and says where."""
    try:
        yield
    except (RagBlendError, OSError, ValueError) as error:
        typer.echo(f"rag-blend: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


def _task_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return names


def _cases(
    data: Sequence[Path], limit: int, passages: int | None, tasks: Sequence[str], shuffle: bool, seed: int
) -> list[Case]:
    """The files' cases, each file's derived ones behind them, made-up ones last."""
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


def _load(path: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer from a directory."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no model directory {str(path)!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights: noise between our own
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _plots(report: QualityReport, out: Path) -> list[Path]:
    from rag_blend.evaluation.plots import draw_plots

    try:
        return draw_plots(report, out)
    except ImportError:
        typer.echo('rag-blend: no plots, matplotlib is missing: pip install "rag-blend[bench]"', err=True)
        return []


def _show(report: QualityReport, written: Sequence[Path]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rag_blend.evaluation.report import table_of

    console = Console()
    if not console.is_terminal:
        console.width = 160  # nobody resizes a file
    console.print(", ".join(f"{name} {value}" for name, value in report.environment.items()), highlight=False)
    for group, lines in report.groups.items():
        header, *rows = table_of(lines, _COLUMNS)
        table = Table(title=f"{group}, n = {lines[0].num_cases}", title_justify="left", box=box.SIMPLE_HEAD)
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
