"""``rag-blend ingest``: read documents, find them again by vectors, and prefill them once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.bill import Bill, bill_of, bytes_per_token
from rag_blend.cli.cluster import RayGpusOption, RayOption, RayWorkersOption, cluster_at
from rag_blend.cli.collection import (
    ChunkOption,
    CodecOption,
    IndexOption,
    PathsArgument,
    StoreOption,
    index_of,
    read_documents,
)
from rag_blend.cli.common import JsonOption, OwnDtypeOption, checked_dtype, user_errors

if TYPE_CHECKING:
    from rag_blend_app.collection import Changes, Collection, Facts
    from rag_blend_app.documents import Reading

    from rag_blend import IngestReport
    from rag_blend.ray import BulkReport


def ingest(
    paths: PathsArgument,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Directory or hub id; not needed for what was ingested before."),
    ] = None,
    store: StoreOption = "kv",
    index: IndexOption = None,
    chunk_tokens: ChunkOption = None,
    codec: CodecOption = "raw",
    namespace: Annotated[str | None, typer.Option(help="Tenant; default: default.")] = None,
    dtype: OwnDtypeOption = None,
    ray: RayOption = None,
    ray_workers: RayWorkersOption = 1,
    ray_gpus: RayGpusOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Read documents, cut them into chunks, and keep the chunks' vectors and KV caches for ask and chat.

    Run it again to go on after an interruption, or when files have changed: only what is new is computed, and of a
    directory, what is gone from it is forgotten. The exit status is 1 if a file could not be read; the others are in.

    Example: rag-blend ingest docs/ handbook.pdf --model HuggingFaceTB/SmolLM2-1.7B-Instruct --store kv
    """
    with user_errors("app"), ExitStack() as stack:
        from rag_blend_app.collection import Collection, facts_of
        from rag_blend_app.conversation import PROMPT
        from rag_blend_app.llm import llm_for

        on_cluster = None if ray is None else stack.enter_context(cluster_at(ray))
        directory = index_of(store, index)
        known = facts_of(directory)
        facts = _agreed(known, model, namespace, chunk_tokens)
        llm = llm_for(facts, store, codec=codec, dtype=checked_dtype(dtype))
        token_bytes = bytes_per_token(facts.model, codec)
        reading = read_documents(paths, progress=not as_json)
        collection = Collection.new(facts) if known is None else Collection.load(directory, facts)
        changes = collection.update(reading.documents, _gone(collection, paths, reading), progress=not as_json)
        chunks = collection.chunks()
        bill = bill_of([chunk.get_content().strip() for chunk in chunks], llm.tokenizer, token_bytes)
        _announce(bill, changes, store, as_json)
        with closing(llm):
            if outdated := [*changes.replaced, *changes.removed]:
                llm.engine.forget(outdated)
            collection.save(directory)
            report: IngestReport | BulkReport
            if on_cluster is None:
                report = llm.attach(collection.index, text_qa_template=PROMPT, show_progress=not as_json)
            else:
                report = on_cluster(
                    chunks,
                    model=facts.model,
                    storage=store,
                    workers=ray_workers,
                    num_gpus=ray_gpus,
                    head=llm.head_of(None, PROMPT, None),
                    namespace=facts.namespace,
                    codec=codec,
                    dtype=dtype,
                    progress=not as_json,
                )
        if as_json:
            documents = {**asdict(changes), "unread": reading.unread}
            done = {"documents": documents, "estimate": asdict(bill), "report": asdict(report), "index": str(directory)}
            typer.echo(json.dumps(done))
        else:
            _show(report, store)
    if reading.unread:
        raise typer.Exit(1)


def _agreed(known: Facts | None, model: str | None, namespace: str | None, chunk_tokens: int | None) -> Facts:
    """What a collection is made with, or was.

    Raises:
        ValueError: What is wanted is not what there is, or no model is named.
    """
    from rag_blend_app.collection import CHUNK_TOKENS, Facts

    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())  # whoever asks may stand elsewhere
    if known is None:
        if model is None:
            raise ValueError("which model is to answer? Name a directory or hub id: --model MODEL")
        return Facts(model, namespace or "default", chunk_tokens or CHUNK_TOKENS)
    for option, given, there in (
        ("--namespace", namespace, known.namespace),
        ("--chunk-tokens", chunk_tokens, known.chunk_tokens),
    ):
        if given not in (None, there):
            raise ValueError(f"this collection has {option} {there}; another one needs a directory of its own: --index")
    return replace(known, model=model or known.model)


def _gone(collection: Collection, paths: Sequence[Path], reading: Reading) -> list[str]:
    """Documents below the given directories that are not there any more."""
    present = {document.id_ for document in reading.documents} | reading.unread.keys()
    directories = [path.resolve() for path in paths if path.is_dir()]
    return [
        id_
        for id_ in collection.document_ids()
        if id_ not in present and any(Path(id_).is_relative_to(directory) for directory in directories)
    ]


def _announce(bill: Bill, changes: Changes, store: str, as_json: bool) -> None:
    """Say what it will take, before it is taken."""
    from rag_blend.sizes import format_bytes
    from rag_blend.storage import open_storage

    with closing(open_storage(store)) as backend:
        quota = backend.stats().quota_bytes
    if not as_json:
        typer.echo(
            f"{len(changes.added)} documents are new, {len(changes.replaced)} changed, {len(changes.removed)} gone; "
            f"in all {bill.chunks:,} chunks, {bill.tokens:,} tokens, about {format_bytes(bill.bytes)} of caches"
            + ("" if quota is None else f" (at most {format_bytes(quota)})")
        )
    if quota is not None and bill.bytes > quota:
        typer.echo(
            f"rag-blend: {store} holds {format_bytes(quota)} at most: what was not used for longest will be missing. "
            'Give it more room ("disk://DIR?quota=...", with --index), or write less: --codec int8 or int4',
            err=True,
        )


def _show(report: IngestReport | BulkReport, store: str) -> None:
    from rag_blend.sizes import format_bytes

    speed = f" ({report.tokens / report.seconds:,.0f} tokens/s)" if report.chunks else ""
    typer.echo(
        f"{report.chunks:,} chunks cached in {report.seconds:.0f} s{speed}, {format_bytes(report.bytes)} written; "
        f"{report.skipped:,} were cached already or are too short"
    )
    typer.echo(f'Ask: rag-blend ask "..." --store {store}')
