"""``rag-blend ingest``: read documents, find them again by vectors, and prefill them once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.bill import Bill, bill_of, bytes_per_token, quota_warning
from rag_blend.cli.cluster import RayGpusOption, RayOption, RayWorkersOption, cluster_at
from rag_blend.cli.collection import (
    ChunkOption,
    CodecOption,
    IndexOption,
    KeepsCopiesOption,
    OnUnsupportedOption,
    PathsArgument,
    StorageOption,
    checked_on_unsupported,
    index_of,
    read_documents,
)
from rag_blend.cli.common import JsonOption, OwnDtypeOption, checked_dtype, complain, user_errors
from rag_blend.cli.models import model_named

if TYPE_CHECKING:
    from rag_blend_app.collection import Changes, Collection, Facts
    from rag_blend_app.documents import Reading

    from rag_blend import IngestReport
    from rag_blend.ray import BulkReport


def ingest(
    paths: PathsArgument,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Directory, hub id, or demo; not needed again."),
    ] = None,
    storage: StorageOption = "kv",
    index: IndexOption = None,
    chunk_tokens: ChunkOption = None,
    codec: CodecOption = "raw",
    exact_first: KeepsCopiesOption = None,
    namespace: Annotated[str | None, typer.Option(help="Tenant; default: default.")] = None,
    dtype: OwnDtypeOption = None,
    on_unsupported: OnUnsupportedOption = None,
    ray: RayOption = None,
    ray_workers: RayWorkersOption = 1,
    ray_gpus: RayGpusOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Read documents, cut them into chunks, and keep the chunks' vectors and KV caches for ask and chat.

    Run it again to go on after an interruption, or when files have changed: only what is new is computed, and of a
    directory, what is gone from it is forgotten. The exit status is 1 if a file could not be read; the others are in.

    Example: rag-blend ingest docs/ handbook.pdf --model HuggingFaceTB/SmolLM2-1.7B-Instruct --storage kv
    """
    with user_errors("app", resumes=True, arguments=("on_unsupported",)), ExitStack() as stack:
        from rag_blend_app.collection import Collection, facts_of
        from rag_blend_app.conversation import PROMPT
        from rag_blend_app.llm import llm_for
        from rag_blend_app.lock import alone_in

        directory = index_of(storage, index)
        _expect_writable(storage)
        stack.enter_context(alone_in(directory))
        known = facts_of(directory)
        unsupported = checked_on_unsupported(on_unsupported)
        facts = _agreed(known, model, namespace, chunk_tokens, unsupported, exact_first)
        on_cluster = None if ray is None else stack.enter_context(_cluster_for(facts, ray))
        llm = llm_for(facts, storage, codec=codec, dtype=checked_dtype(dtype))
        token_bytes = bytes_per_token(facts.model, codec, facts.on_unsupported, facts.exact_first)
        reading = read_documents(paths, progress=not as_json)
        collection = Collection.new(facts) if known is None else Collection.load(directory, facts)
        changes = collection.update(reading.documents, _gone(collection, paths, reading), progress=not as_json)
        chunks = collection.chunks()
        bill = bill_of([chunk.get_content().strip() for chunk in chunks], llm.tokenizer, token_bytes)
        _announce(bill, changes, storage, as_json)
        with closing(llm):
            if outdated := [*changes.replaced, *changes.removed]:
                llm.engine.forget(outdated)
            collection.save(directory, pending=bill.chunks)
            report: IngestReport | BulkReport
            if on_cluster is None:
                report = llm.attach(collection.index, text_qa_template=PROMPT, show_progress=not as_json)
            else:
                report = on_cluster(
                    chunks,
                    model=facts.model,
                    storage=storage,
                    workers=ray_workers,
                    num_gpus=ray_gpus,
                    head=llm.head_of(None, PROMPT, None),
                    namespace=facts.namespace,
                    codec=codec,
                    exact_first=facts.exact_first,
                    dtype=dtype,
                    progress=not as_json,
                )
            collection.complete(directory)
            can_blend = on_cluster is not None or llm.engine.can_blend
        if as_json:
            documents = {**asdict(changes), **reading.oddities}
            done = {"documents": documents, "estimate": asdict(bill), "report": asdict(report), "index": str(directory)}
            typer.echo(json.dumps(done))
        else:
            _show(report, storage, can_blend)
    if reading.unread:
        raise typer.Exit(1)


def _agreed(
    known: Facts | None,
    model: str | None,
    namespace: str | None,
    chunk_tokens: int | None,
    on_unsupported: str | None,
    exact_first: bool | None,
) -> Facts:
    """What a collection is made with, or was.

    Raises:
        ValueError: What is wanted is not what there is, or no model is named.
    """
    from rag_blend_app.collection import CHUNK_TOKENS, Facts

    if known is None:
        if model is None:
            raise ValueError("which model is to answer? Name a directory or hub id: --model MODEL")
        return Facts(
            model_named(model),
            namespace or "default",
            chunk_tokens or CHUNK_TOKENS,
            on_unsupported or "error",
            exact_first is not False,
        )
    for option, given, there in (
        ("--namespace", namespace, known.namespace),
        ("--chunk-tokens", chunk_tokens, known.chunk_tokens),
    ):
        if given not in (None, there):
            raise ValueError(f"this collection has {option} {there}; another one needs a directory of its own: --index")
    unsupported = on_unsupported or known.on_unsupported
    copies = known.exact_first if exact_first is None else exact_first
    return replace(known, model=model_named(model or known.model), on_unsupported=unsupported, exact_first=copies)


def _cluster_for(facts: Facts, address: str) -> AbstractContextManager[Callable[..., BulkReport]]:
    """See `cluster_at`.

    Raises:
        ValueError: The model may turn out not to be blended: then there is nothing for workers to do.
    """
    if facts.on_unsupported != "error":
        raise ValueError(
            f"--ray is for models that are blended, so it does not go with --on-unsupported {facts.on_unsupported}: "
            "ingest without --ray, or with --on-unsupported error"
        )
    return cluster_at(address)


def _gone(collection: Collection, paths: Sequence[Path], reading: Reading) -> list[str]:
    """Documents below the given directories that are not there any more."""
    present = {document.id_ for document in reading.documents} | reading.unread.keys()
    directories = [path.resolve() for path in paths if path.is_dir()]
    return [
        id_
        for id_ in collection.document_ids()
        if id_ not in present and any(Path(id_).is_relative_to(directory) for directory in directories)
    ]


def _expect_writable(storage: str) -> None:
    """Complain now, not when the first chunk is computed.

    Raises:
        PermissionError: The store is a directory that cannot be written.
    """
    if Path(storage).is_dir() and not os.access(storage, os.W_OK | os.X_OK):
        raise PermissionError(f"{storage} cannot be written: ask may use it, ingest needs another --storage, or rights")


def _announce(bill: Bill, changes: Changes, storage: str, as_json: bool) -> None:
    """Say what it will take, before it is taken."""
    from rag_blend.sizes import format_bytes
    from rag_blend.storage import open_storage

    with closing(open_storage(storage)) as backend:
        quota = backend.stats().quota_bytes
    if not as_json:
        typer.echo(
            f"{len(changes.added)} documents are new, {len(changes.replaced)} changed, {len(changes.removed)} gone; "
            f"in all {bill.chunks:,} chunks, {bill.tokens:,} tokens, about {format_bytes(bill.bytes)} of caches"
            + ("" if quota is None else f" (at most {format_bytes(quota)})")
        )
    if warning := quota_warning(bill.bytes, quota, storage):
        complain(warning)


def _show(report: IngestReport | BulkReport, storage: str, can_blend: bool) -> None:
    from rag_blend.sizes import format_bytes

    speed = f" ({report.tokens / report.seconds:,.0f} tokens/s)" if report.chunks else ""
    typer.echo(
        f"{report.chunks:,} chunks cached in {report.seconds:.0f} s{speed}, {format_bytes(report.bytes)} written; "
        f"{report.skipped:,} were cached already or are too short"
        if can_blend
        else "nothing is cached: served by full prefill"
    )
    typer.echo(f'Ask: rag-blend ask "..." --storage {storage}')
