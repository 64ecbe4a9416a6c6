"""``rag-blend explain``: which tokens of a prompt are reused, recomputed and fresh, and why."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rag_blend_app.terminal import printable

from rag_blend.cli.collection import IndexOption, StorageOption, TopKOption, conversation_with
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
    from rag_blend.explain import Explanation, Stretch
    from rag_blend.trace import Trace


def explain(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT_OR_QUESTION",
            help="With --model: a whole prompt, as the model gets it. Without: a question to what was ingested.",
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file with the prompt or question.", metavar="FILE")] = None,
    storage: StorageOption = "kv",
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face model's directory, or demo.", metavar="DIR")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Tenant; like the next six, with --model.")] = "default",
    prime: PrimeOption = None,
    prime_tokens: PrimeTokensOption = None,
    prime_texts: PrimeTextsOption = None,
    exact_first: ExactFirstOption = None,
    any_head: Annotated[bool, typer.Option("--any-head", help="Reuse chunks behind every head.")] = False,
    special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--special-tokens/--no-special-tokens",
            help="Whether the tokenizer adds its own; no for what a chat template wrote. Default: unless BOS is there.",
        ),
    ] = None,
    index: IndexOption = None,
    top_k: TopKOption = 4,
    dtype: OwnDtypeOption = None,
    html: Annotated[Path | None, typer.Option(help="Write a picture of the prompt there, too.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
) -> None:
    """Say which tokens of a prompt are reused, recomputed and fresh, and why; and what to do where none is reused.

    Example: rag-blend explain --model path/to/model --storage kv --file prompt.txt --html prompt.html
    """
    with user_errors("app"):
        text = _text_of(prompt, file)
        expect_store(storage)
        if model is None:
            found, policy = _question(text, storage, index, top_k, dtype)
        else:
            priming = given(prime=prime, prime_tokens=prime_tokens, prime_texts=prime_texts, exact_first=exact_first)
            options = {"namespace": namespace, "any_head": any_head, **priming}
            found, policy = _whole_prompt(text, storage, load_model(model, dtype), special_tokens, options)
        if html is not None:
            found.served.save_html(html)
        if as_json:
            typer.echo(json.dumps(_as_data(found, policy), indent=2))
        else:
            _show(found, policy, html)


def _text_of(prompt: str | None, file: Path | None) -> str:
    if file is not None and prompt is None:
        return file.read_text("utf-8")
    if prompt is None or file is not None:
        raise ValueError("give either a prompt, a question, or --file")
    return prompt


def _whole_prompt(
    prompt: str, storage: str, loaded: tuple[Any, Any], special_tokens: bool | None, options: dict[str, Any]
) -> tuple[Explanation, str]:
    from rag_blend.engine import BlendEngine
    from rag_blend.explain import explain as find
    from rag_blend.storage import open_storage

    backend = open_storage(storage)
    # "calibrated": what is not blended is still explained, and with sliding windows, what `ask` does.
    with BlendEngine(*loaded, backend, on_unsupported="calibrated", **options) as engine:
        prefill = engine.prefill(prompt, add_special_tokens=special_tokens)
        return find(engine, backend, options["namespace"], prefill), str(engine.policy)


def _question(
    question: str, storage: str, index: Path | None, top_k: int, dtype: str | None
) -> tuple[Explanation, str]:
    """Ask as ``rag-blend ask`` does, for one token."""
    from rag_blend.explain import explain as find
    from rag_blend.storage import open_storage

    or_else = "; or give --model, and the whole prompt with the retrieved texts"
    with (
        conversation_with(storage, index, None, top_k, 1, dtype, or_else) as conversation,
        closing(open_storage(storage)) as backend,
        conversation.llm.engine.listening() as answers,
    ):
        "".join(conversation.answer(conversation.look_up(question)))
        engine = conversation.llm.engine
        return find(engine, backend, conversation.llm.namespace, answers[-1]), str(engine.policy)


def _as_data(found: Explanation, policy: str) -> dict[str, Any]:
    trace = _trace_of(found)
    return {
        "policy": policy,
        "stats": asdict(found.served.stats),
        "seconds": trace.seconds._asdict(),
        "stretches": [_stretch_data(stretch, trace) for stretch in found.stretches],
        "hints": list(found.hints),
    }


def _stretch_data(stretch: Stretch, trace: Trace) -> dict[str, Any]:
    chunk = None if stretch.chunk is None else trace.chunks[stretch.chunk - 1]
    named = {"key": None, "outcome": None} if chunk is None else {"key": chunk.key, "outcome": chunk.outcome}
    return {**asdict(stretch), **named, **_counts(trace, stretch.start, stretch.end)}


def _counts(trace: Trace, start: int, end: int) -> dict[str, int]:
    from rag_blend.trace import Kind

    return {kind.name.lower(): trace.count(kind, start, end) for kind in Kind}


def _show(found: Explanation, policy: str, html: Path | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    trace, stats = _trace_of(found), found.served.stats
    table = Table(
        title=f"{stats.prompt_tokens:,} tokens: {stats.prefix_tokens + stats.reused_tokens:,} reused, "
        f"{stats.recomputed_tokens:,} recomputed, {stats.fresh_tokens:,} fresh; {policy}; "
        f"first token after {stats.ttft_s:.2f} s",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    kinds = [name for name, count in _counts(trace, 0, len(trace)).items() if count]
    for name in ("tokens", "chunk", *kinds):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("begins with", ratio=2)
    table.add_column("why", ratio=3)
    for stretch in found.stretches:
        tokens = _counts(trace, stretch.start, stretch.end)
        counts = (f"{tokens[name]:,}" if tokens[name] else "" for name in kinds)
        place = f"{stretch.start:,}-{stretch.end - 1:,}"
        # As `Text`: what stands in a prompt is no markup.
        table.add_row(place, str(stretch.chunk or ""), *counts, Text(printable(stretch.text)), Text(stretch.why))
    console = console_of()
    console.print(table, highlight=False)
    for hint in found.hints:
        console.print(Text(f"Hint: {hint}."))
    if html is not None:
        console.print(str(html), highlight=False, soft_wrap=True, markup=False)


def _trace_of(found: Explanation) -> Trace:
    assert found.served.trace is not None
    return found.served.trace
