"""``rag-blend bench codecs``: what the ways of writing caches down save, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.common import (
    DataOption,
    DtypeOption,
    ModelOption,
    PassagesOption,
    console_of,
    load_model,
    read_cases,
    table_with,
    user_errors,
)

if TYPE_CHECKING:
    from rag_blend.evaluation.codec_report import CodecReport


def codecs(
    model: ModelOption,
    data: DataOption,
    limit: Annotated[int, typer.Option(min=1, help="Cases per file.")] = 8,
    passages: PassagesOption = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="A codec's name; may be repeated. Default: all that are installed.")
    ] = None,
    policy: Annotated[str, typer.Option(help="How answers are blended, as in bench quality.")] = "default",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    out: Annotated[Path, typer.Option(help="For the report, and for KV caches while it runs.", metavar="DIR")] = Path(
        "codecs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    dtype: DtypeOption = "float32",
) -> None:
    """Compare codecs of stored caches: size, speed, error, and answers against raw and against full prefill.

    Example: rag-blend bench codecs --model path/to/model --data questions.jsonl --codec raw --codec int8
    """
    with user_errors():
        from rag_blend.codecs import codec_of
        from rag_blend.evaluation.codecs import measure_codecs
        from rag_blend.evaluation.policies import Policy

        chosen = [codec_of(name).name for name in codec] if codec else _installed()
        blending = Policy.parse(policy)
        cases = read_cases(data, limit, passages)
        loaded, tokenizer = load_model(model, dtype)
        report = measure_codecs(loaded, tokenizer, cases, chosen, out, blending, max_new_tokens, not as_json)
        written = report.write(out)
        if as_json:
            typer.echo(report.to_json(), nl=False)
        else:
            _show(report, written)


def _installed() -> list[str]:
    from rag_blend.codecs import codec_names, codec_of

    names = []
    for name in codec_names():
        try:
            names.append(codec_of(name).name)
        except ModuleNotFoundError as error:
            typer.echo(f"rag-blend: without {name}: {error}", err=True)
    return names


def _show(report: CodecReport, written: list[Path]) -> None:
    console = console_of()
    console.print(", ".join(f"{name} {value}" for name, value in report.environment.items()), highlight=False)
    header, *rows = report.table()
    console.print(table_with(f"{len(report.prompt_tokens)} prompts", header, rows))
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
