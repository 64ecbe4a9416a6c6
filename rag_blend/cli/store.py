"""``rag-blend store``: look after stored caches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rag_blend_app.terminal import printable

from rag_blend.cli.common import JsonOption, console_of, user_errors

if TYPE_CHECKING:
    from rag_blend.storage import StorageBackend, StorageStats

store = typer.Typer(help="Look after stored caches: a directory, a Redis, an object store.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(metavar="STORAGE", help="A directory or URL: kv/, redis://host/0, s3://bucket/prefix.")
]


@store.command()
def stats(storage: Where, as_json: JsonOption = False) -> None:
    """Count entries and bytes.

    Example: rag-blend store stats kv/
    """
    with user_errors(), _opened(storage) as backend:
        found = backend.stats()
        if as_json:
            _print_json({"entries": found.entries, "bytes": found.bytes, "quota_bytes": found.quota_bytes})
        else:
            typer.echo(_line(found))


@store.command()
def verify(
    storage: Where,
    keep: Annotated[bool, typer.Option("--keep", help="Report damaged entries, but do not set them aside.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every entry and compare its checksums; damaged ones are set aside and will be computed anew.

    The exit status is 1 if anything was damaged or could not be read. Example: rag-blend store verify kv/
    """
    with user_errors(), _opened(storage) as backend:
        from tqdm import tqdm

        from rag_blend.maintenance import verify as check

        with tqdm(desc="entries", unit="", total=backend.stats().entries, disable=as_json) as bar:
            report = check(backend, set_aside=not keep, step=bar.update)
    if as_json:
        _print_json(
            {
                "entries": report.entries,
                "bytes": report.bytes,
                "damaged": report.damaged,
                "unreadable": report.unreadable,
                "unknown": report.unknown,
            }
        )
    else:
        for what, trouble in (("damaged", report.damaged), ("unreadable", report.unreadable)):
            for key, reason in trouble.items():
                typer.echo(f"{what}  {key}  {reason}")
        sound = report.entries - len(report.damaged) - len(report.unreadable) - report.unknown
        typer.echo(
            f"{report.entries} entries, {_size(report.bytes)}: {sound} sound, {len(report.damaged)} damaged"
            f"{'' if keep or not report.damaged else ' (set aside)'}, {len(report.unreadable)} unreadable, "
            f"{report.unknown} of an unknown codec"
        )
    if report.damaged or report.unreadable:
        raise typer.Exit(1)


@store.command()
def gc(
    storage: Annotated[str, typer.Argument(metavar="DIR", help="A directory of caches, or disk://DIR?quota=...")],
    quota: Annotated[
        str | None, typer.Option(help="What it may hold afterwards: 20GB, 512MiB, ...; default: its own quota.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the entries that were not used for longest until a directory is within a quota, and left-over files.

    Example: rag-blend store gc kv/ --quota 20GB
    """
    with user_errors(), _opened(storage) as backend:
        from rag_blend.sizes import parse_bytes
        from rag_blend.storage.disk import DiskBackend

        if not isinstance(backend, DiskBackend):
            raise ValueError("only a directory has a quota that it can be trimmed to")
        if quota is not None:
            backend.quota_bytes = parse_bytes(quota)
        before = backend.stats()
        backend.trim()
        after = backend.stats()
        removed, freed = before.entries - after.entries, before.bytes - after.bytes
        if as_json:
            _print_json({"removed": removed, "freed_bytes": freed, "entries": after.entries, "bytes": after.bytes})
        else:
            typer.echo(f"{removed} entries removed, {_size(freed)} freed; {_line(after)}")


@store.command()
def forget(
    storage: Where,
    documents: Annotated[list[str], typer.Argument(metavar="DOC_ID...", help="Ids given at ingestion.")],
    namespace: Annotated[str, typer.Option(help="The tenant whose documents they are.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Erase what is stored for documents, for all models.

    Example: rag-blend store forget kv/ handbook.pdf
    """
    with user_errors(), _opened(storage) as backend:
        from rag_blend.maintenance import forget as erase

        receipt = erase(backend, set(documents), namespace)
        if as_json:
            _print_json({"documents": receipt.documents, "keys": receipt.keys, "samples": receipt.samples})
            return
        typer.echo(f"{len(receipt.keys)} entries erased")
        if receipt.samples:
            typer.echo("a text that other chunks were primed with was among them: ingest the remaining documents again")


@store.command()
def export(
    storage: Where,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file, which must not exist yet.")],
    as_json: JsonOption = False,
) -> None:
    """Write a store to one file, with its documents and records.

    Example: rag-blend store export kv/ kv.tar
    """
    with user_errors(), _opened(storage) as backend:
        from tqdm import tqdm

        from rag_blend.maintenance import export as write

        try:
            with open(target, "xb", opener=_private) as file, tqdm(desc="entries", unit="", disable=as_json) as bar:
                count = write(backend, file, bar.update)
        except BaseException as error:
            if not isinstance(error, FileExistsError):
                target.unlink(missing_ok=True)  # half a store is worse than none
            raise
        size = target.stat().st_size
        if as_json:
            _print_json({"entries": count, "bytes": size})
        else:
            typer.echo(f"{count} entries, {_size(size)} in {target}")


@store.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `store export` wrote.")],
    storage: Where,
    as_json: JsonOption = False,
) -> None:
    """Take in an exported store; each entry is verified first. Import only from people you trust with your answers.

    Example: rag-blend store import kv.tar redis://host/0
    """
    # The file first: opening the store may make it.
    with user_errors(), source.open("rb") as file, _opened(storage, must_exist=False) as backend:
        from tqdm import tqdm

        from rag_blend.maintenance import import_ as take_in

        with tqdm(desc="files", unit="", disable=as_json) as bar:
            report = take_in(backend, file, bar.update)
        if as_json:
            _print_json({"entries": report.entries, "refused": report.refused})
        else:
            for name, reason in report.refused.items():
                typer.echo(printable(f"refused  {name}  {reason}"))  # names that somebody else has chosen
            typer.echo(f"{report.entries} entries imported, {len(report.refused)} files refused")
    if report.refused:
        raise typer.Exit(1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # caches reveal the texts


@contextmanager
def _opened(storage: str, must_exist: bool = True) -> Iterator[StorageBackend]:
    from rag_blend.storage import directory_of, open_storage

    if must_exist and (directory := directory_of(storage)) is not None:
        _expect_store(directory)
    backend = open_storage(storage)
    try:
        yield backend
    finally:
        backend.close()


def _expect_store(directory: Path) -> None:
    """Opening a store would make one.

    Raises:
        FileNotFoundError: There is none.
    """
    from rag_blend.storage._layout import Layout

    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {str(directory)!r}")
    traces = (directory / "index.sqlite", directory / "documents.sqlite", directory / "records")
    if not any(path.exists() for path in traces) and next(Layout(directory).keys(), None) is None:
        raise FileNotFoundError(f"{str(directory)!r} is no store: no caches were ever written there")


def _line(found: StorageStats) -> str:
    quota = "" if found.quota_bytes is None else f" of {_size(found.quota_bytes)}"
    return f"{found.entries} entries, {_size(found.bytes)}{quota}"


def _size(num_bytes: int) -> str:
    from rag_blend.sizes import format_bytes

    return format_bytes(num_bytes)


def _print_json(value: object) -> None:
    console_of().print_json(json.dumps(value))
