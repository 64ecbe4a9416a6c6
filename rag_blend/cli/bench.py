"""``rag-blend bench``: measure quality against full prefill, and draw what reuse does to attention and KV caches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.bench_speed import COMMANDS, JsonReportOption
from rag_blend.cli.bench_speed_report import report
from rag_blend.cli.bench_store import store
from rag_blend.cli.codecs import codecs
from rag_blend.cli.common import (
    TASKS,
    DataOption,
    DtypeOption,
    ModelOption,
    PassagesOption,
    console_of,
    load_model,
    read_cases,
    table_with,
    task_names,
    user_errors,
)
from rag_blend.errors import install_hint

if TYPE_CHECKING:
    from rag_blend.evaluation import QualityReport

bench = typer.Typer(help="Measurements: quality, speed, and storage.", no_args_is_help=True)
for command in (*COMMANDS, report, codecs, store):
    bench.command()(command)

_POLICIES = ("published", "reuse", "default")
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


@bench.command()
def quality(
    model: ModelOption,
    data: DataOption,
    limit: Annotated[int, typer.Option(min=1, help="Cases per file, and per further task.")] = 40,
    passages: PassagesOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="prime/selector[:ratio][,option=value], published, reuse, default; may be repeated."),
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Put the passages of each case in another order.")] = False,
    join: Annotated[int, typer.Option(min=1, help="So many passages in a row become one, for longer chunks.")] = 1,
    tasks: Annotated[str, typer.Option(help=f"More tasks, separated by commas: {', '.join(TASKS)}.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    floors: Annotated[int, typer.Option(min=0, help="Cases per group on which the floors are measured.")] = 5,
    storage: Annotated[
        Path | None, typer.Option(help="Where KV caches live; default: kv in --out.", metavar="DIR")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="For reports, plots and case results; a run resumes.", metavar="DIR")
    ] = Path("quality"),
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    seed: Annotated[int, typer.Option(help="Of shuffling and made-up tasks.")] = 0,
) -> None:
    """Compare policies with full prefill: KL, agreement, F1, abstentions, copying, time to first token.

    Example: rag-blend bench quality --model path/to/model --data questions.jsonl --policy published --policy default
    """
    with user_errors(resumes=True):
        from rag_blend.evaluation import Policy, QualityBench

        chosen = [Policy.parse(text) for text in policy or _POLICIES]
        cases = read_cases(data, limit, passages, task_names(tasks), shuffle, seed, join)
        loaded, tokenizer = load_model(model, dtype)
        with QualityBench(loaded, tokenizer, storage or out / "kv", chosen, max_new_tokens, out, floors) as measuring:
            measuring.prepare(cases, progress=not as_json)
            report = measuring.run(cases, progress=not as_json)
        written = [*report.write(out), *_plots(report, out)]
        if as_json:
            typer.echo(report.to_json(), nl=False)
        else:
            _show(report, written)


@bench.command()
def figures(
    model: ModelOption,
    data: DataOption,
    limit: Annotated[int, typer.Option(min=1, help="Cases per file.")] = 8,
    passages: Annotated[int, typer.Option(min=1, help="Passages per prompt.")] = 8,
    out: Annotated[Path, typer.Option(help="Where the figures go.", metavar="DIR")] = Path("figures"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON.")] = False,
    dtype: DtypeOption = "float32",
) -> None:
    """Draw how KV caches and attention deviate from full prefill.

    Example: rag-blend bench figures --model path/to/model --data questions.jsonl --out figures
    """
    with user_errors():
        from rag_blend.evaluation.figures import draw_figures

        cases = read_cases(data, limit, passages)
        loaded, tokenizer = load_model(model, dtype)
        paths = draw_figures(loaded, tokenizer, cases, out)
        if as_json:
            typer.echo(json.dumps({"figures": [str(path) for path in paths]}))
        else:
            for path in paths:
                typer.echo(str(path))


def _plots(report: QualityReport, out: Path) -> list[Path]:
    from rag_blend.evaluation.plots import draw_plots

    try:
        return draw_plots(report, out)
    except ImportError:
        typer.echo(f"rag-blend: no plots, matplotlib is missing; {install_hint('bench')}", err=True)
        return []


def _show(report: QualityReport, written: Sequence[Path]) -> None:
    from rag_blend.evaluation.report import table_of

    console = console_of()
    console.print(", ".join(f"{name} {value}" for name, value in report.environment.items()), highlight=False)
    for group, lines in report.groups.items():
        header, *rows = table_of(lines, _COLUMNS)
        console.print(table_with(f"{group}, n = {lines[0].num_cases}", header, rows))
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
