"""``rag-blend estimate``: disk and time, before anything is ingested."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_blend.cli.bill import Bill, bill_of, bytes_per_token, quota_warning
from rag_blend.cli.collection import (
    ChunkOption,
    CodecOption,
    KeepsCopiesOption,
    OnUnsupportedOption,
    PathsArgument,
    checked_on_unsupported,
    read_documents,
)
from rag_blend.cli.common import JsonOption, OwnDtypeOption, checked_dtype, complain, user_errors
from rag_blend.cli.models import model_named

if TYPE_CHECKING:
    from rag_blend_app.collection import Facts

_SAMPLE_TOKENS = 2048  # prefilled to see how fast it goes


def estimate(
    paths: PathsArgument,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Directory, hub id, or demo.")],
    chunk_tokens: ChunkOption = None,
    codec: CodecOption = "raw",
    exact_first: KeepsCopiesOption = None,
    measure: Annotated[bool, typer.Option("--time/--no-time", help="Load the model and time a short prefill.")] = True,
    dtype: OwnDtypeOption = None,
    on_unsupported: OnUnsupportedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what ingesting documents would take: tokens, chunks, disk, and time. Nothing is stored.

    It warns of what does not fit into a directory's default quota.

    The exit status is 1 if a file could not be read; the figures are of the others.

    Example: rag-blend estimate docs/ --model HuggingFaceTB/SmolLM2-1.7B-Instruct --no-time
    """
    with user_errors("app", arguments=("on_unsupported",)):
        from rag_blend_app.collection import CHUNK_TOKENS, Facts, split
        from rag_blend_app.llm import llm_for

        from rag_blend.storage._quota import default_quota

        dtype = checked_dtype(dtype)
        model = model_named(model)
        unsupported = checked_on_unsupported(on_unsupported) or "error"
        facts = Facts(model, chunk_tokens=chunk_tokens or CHUNK_TOKENS, on_unsupported=unsupported)
        tokenizer = llm_for(facts, "").tokenizer
        token_bytes = bytes_per_token(model, codec, unsupported, exact_first is not False)
        reading = read_documents(paths, progress=not as_json)
        texts = [node.get_content().strip() for node in split(reading.documents, facts)]
        bill = bill_of(texts, tokenizer, token_bytes)
        speed = _tokens_per_second(texts, tokenizer, facts, dtype) if measure else None
        if as_json:
            seconds = None if speed is None else bill.tokens / speed
            found = {"documents": len(reading.documents), **asdict(bill), "tokens_per_s": speed, "seconds": seconds}
            typer.echo(json.dumps({**found, **reading.oddities}))
        else:
            _show(len(reading.documents), bill, codec, token_bytes, speed)
        if warning := quota_warning(bill.bytes, default_quota(Path.cwd(), held=0), "a store here"):
            complain(warning)
    if reading.unread:
        raise typer.Exit(1)


def _tokens_per_second(
    texts: Sequence[str], tokenizer: Callable[[str], list[int]], facts: Facts, dtype: str | None
) -> float | None:
    """How fast chunks are ingested, priming included; None if all are too short to be, or the model does not blend."""
    from rag_blend import BlendEngine

    sample: list[str] = []
    tokens = 0
    for text in texts:
        sample.append(text)
        tokens += len(tokenizer(text))
        if tokens >= _SAMPLE_TOKENS:
            break
    options: dict[str, Any] = {"recompute_ratio": None, "dtype": dtype, "on_unsupported": facts.on_unsupported}
    with BlendEngine.from_pretrained(facts.model, storage=None, **options) as engine:
        report = engine.ingest(sample, progress=False)
    return report.tokens / report.seconds if report.tokens else None


def _show(num_documents: int, bill: Bill, codec: str, token_bytes: float, speed: float | None) -> None:
    from rag_blend.sizes import format_bytes

    typer.echo(f"{num_documents:,} documents, {bill.chunks:,} chunks, {bill.tokens:,} tokens")
    if not token_bytes:
        typer.echo("nothing is cached: served by full prefill")
        return
    typer.echo(f"disk: about {format_bytes(bill.bytes)}, {format_bytes(token_bytes)} per token ({codec})")
    if speed is not None:
        typer.echo(f"time: about {_duration(bill.tokens / speed)} here, at {speed:,.0f} tokens/s")


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
