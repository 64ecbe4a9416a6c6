"""``rag-blend doctor``: what can be done for a model, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.common import (
    ExactFirstOption,
    OwnDtypeOption,
    PrimeOption,
    PrimeTextsOption,
    PrimeTokensOption,
    console_of,
    expect_store,
    given,
    load_model,
    user_errors,
)

if TYPE_CHECKING:
    from rag_blend.doctor import ModelReport


def doctor(
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face model, or demo.", metavar="MODEL")],
    storage: Annotated[
        Path | None, typer.Option(help="A store, to say which calibration its engines follow.", metavar="DIR")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    prime: PrimeOption = None,
    prime_tokens: PrimeTokensOption = None,
    prime_texts: PrimeTextsOption = None,
    exact_first: ExactFirstOption = None,
    dtype: OwnDtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
) -> None:
    """Load a model, try out whether it can be blended, and say what its caches take.

    The exit status is 1 if it cannot be blended. Example: rag-blend doctor path/to/model
    """
    with user_errors():
        if storage is not None:
            expect_store(str(storage))
        from rag_blend.doctor import examine

        loaded, tokenizer = load_model(model, dtype)
        priming = given(prime=prime, prime_tokens=prime_tokens, prime_texts=prime_texts, exact_first=exact_first)
        report = examine(loaded, tokenizer, storage, namespace=namespace, **priming)
        if as_json:
            typer.echo(json.dumps({**asdict(report), "gib_per_million_tokens": report.gib_per_million_tokens}))
        else:
            _show(report, storage)
    if report.mode != "blend":
        raise typer.Exit(1)


def _show(report: ModelReport, storage: Path | None) -> None:
    from rich import box
    from rich.table import Table

    from rag_blend.doctor import WHAT_MODES_MEAN

    table = Table(title=report.model, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("mode", f"{report.mode}: {WHAT_MODES_MEAN[report.mode]}")
    if report.reason is not None:
        table.add_row("why", report.reason)
    table.add_row("self-test", report.self_test or "not reached")
    table.add_row("family", f"{report.family}, {report.parameters:,} parameters in {report.dtype}")
    unseen = report.mode == "blend" and not report.sees_attention
    table.add_row("attention", report.attention + ("; what it attends to cannot be seen" if unseen else ""))
    table.add_row("RoPE", ", ".join(report.rope) or "none")
    table.add_row("context window", f"{report.context_window:,} tokens")
    without = f", {report.layers_without_rope} of them without RoPE" if report.layers_without_rope else ""
    table.add_row("layers", f"{report.layers}{without}")
    if report.kv_bytes_per_token is not None:
        heads = f"{report.kv_heads} heads of {report.head_dim}, keys and values in 16 bits"
        table.add_row("stored per token", f"{report.kv_bytes_per_token / 1024:.1f} KiB ({heads})")
        table.add_row(
            "a million tokens",
            f"{report.gib_per_million_tokens:.1f} GiB on disk, twice that with exact_first, as is the default",
        )
    if storage is not None and report.policy is not None:
        table.add_row("engines on the store", report.policy)
    console_of().print(table, highlight=False)
