"""What the commands around a collection share: their options, where a collection is, and how an answer is shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rag_blend_app.terminal import printable

from rag_blend.cli.common import checked_dtype, complain
from rag_blend.cli.models import model_named
from rag_blend.errors import RagBlendError

if TYPE_CHECKING:
    from rag_blend_app.collection import Collection
    from rag_blend_app.conversation import Conversation, Reply
    from rag_blend_app.documents import Reading

PathsArgument = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Directories, or .txt, .md, .rst, .html and .pdf files.")
]
StorageOption = Annotated[
    str, typer.Option("--storage", metavar="STORAGE", help="Where KV caches live: a directory, or a URL with --index.")
]
IndexOption = Annotated[
    Path | None,
    typer.Option("--index", metavar="DIR", help="Where chunks and vectors live; default: STORAGE-index."),
]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk-tokens", min=32, help="Longest chunk, in the model's tokens; default: 512.")
]
CodecOption = Annotated[str, typer.Option("--codec", help="How caches are written down: raw, zstd, int8, int4.")]
KeepsCopiesOption = Annotated[
    bool | None,
    typer.Option(
        "--exact-first/--no-exact-first",
        help="What stands first in a prompt, the best hit, is exact; for twice the disk. Default: as before, or yes.",
    ),
]
OnUnsupportedOption = Annotated[
    str | None,
    typer.Option(
        "--on-unsupported",
        help="A model that cannot be blended: error, full, or for sliding windows calibrated; default: error.",
    ),
]
MovedModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="If the model has moved; default: as ingested.")
]
_ON_UNSUPPORTED = ("error", "full", "calibrated")
_MUCH_TEXT = 100_000_000  # bytes; some MB a second are read and split

TopKOption = Annotated[int, typer.Option("--top-k", min=1, help="Chunks per prompt.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]


def index_of(storage: str, index: Path | None) -> Path:
    """The directory of the collection that belongs to a store.

    Raises:
        ValueError: The store is no directory, so that nothing lies beside it.
    """
    if index is not None:
        return index
    if "://" in storage:
        raise ValueError("a store that is no directory needs --index DIR, for chunks and vectors")
    directory = Path(storage).absolute()
    return directory.with_name(f"{directory.name}-index")


def checked_on_unsupported(choice: str | None) -> str | None:
    """The same choice.

    Raises:
        ValueError: It is none that there is.
    """
    if choice not in (None, *_ON_UNSUPPORTED):
        raise ValueError(f"--on-unsupported is one of {', '.join(_ON_UNSUPPORTED)}, not {choice!r}")
    return choice


@contextmanager
def conversation_with(
    storage: str,
    index: Path | None,
    model: str | None,
    top_k: int,
    max_new_tokens: int,
    dtype: str | None,
    or_else: str = "",
) -> Iterator[Conversation]:
    """A conversation about what was ingested into a store; `or_else` ends the complaint where nothing was.

    Raises:
        RagBlendError: Nothing was.
        OSError: Its model is not there.
    """
    from rag_blend_app.collection import Collection, facts_of
    from rag_blend_app.conversation import Conversation
    from rag_blend_app.llm import llm_for

    directory = index_of(storage, index)
    facts = facts_of(directory)
    if facts is None:
        raise RagBlendError(
            f"there is no collection in {str(directory)!r}; make one: "
            f"rag-blend ingest DIR --model MODEL --storage {storage}{or_else}"
        )
    facts = replace(facts, model=model_named(model or facts.model))
    collection = Collection.load(directory, facts)
    _tell_of_interruption(collection, storage)
    with closing(llm_for(facts, storage, max_new_tokens, dtype=checked_dtype(dtype))) as llm, _calibration_untold():
        yield Conversation(collection, llm, top_k)


def _tell_of_interruption(collection: Collection, storage: str) -> None:
    """Say so if the last ingestion did not end: what it did not come to is computed with every question."""
    if not collection.facts.pending:
        return
    from rag_blend.maintenance import entries_of
    from rag_blend.storage import open_storage

    with closing(open_storage(storage)) as backend:
        cached = len(entries_of(backend, set(collection.document_ids()), collection.facts.namespace))
    if cached < collection.facts.pending:
        complain(
            f"{collection.facts.pending - cached:,} of {collection.facts.pending:,} chunks are not cached: "
            f"run `rag-blend ingest DIR --storage {storage}` again to complete it"
        )


@contextmanager
def _calibration_untold() -> Iterator[None]:
    """Keep the engine from saying with every question what `rag-blend ingest` has said: nothing is calibrated."""

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("no calibration for")

    log = logging.getLogger("rag_blend.engine")
    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


def print_answer(
    conversation: Conversation, question: str, as_json: bool, show: Callable[[Reply], None], full: bool = False
) -> bool:
    """Print an answer as it comes, and `show` what is known of it then; or print all of it as a line of JSON.

    Args:
        conversation: Whose answer.
        question: The question.
        as_json: Print a line of JSON.
        show: Prints what is known of an answer.
        full: Answer by full prefill.

    Returns:
        Whether there is one: False if nothing resembles the question, which is told.
    """
    reply = conversation.look_up(question)
    if not reply.sources:
        complain("nothing in the collection resembles the question")
        return False
    for piece in conversation.answer(reply, reuse=not full):
        if not as_json:
            typer.echo(printable(piece), nl=False)
    if as_json:
        sources = [asdict(source) for source in reply.sources]
        record = {"question": reply.question, "answer": reply.text, "sources": sources, "stats": reply.figures}
        typer.echo(json.dumps(record))
    else:
        show(reply)
    return True


def read_documents(paths: Sequence[Path], progress: bool) -> Reading:
    """Documents of files; those that cannot be read, have no text or are not in UTF-8 are told of.

    Raises:
        OSError: There are none.
        ValueError: One is of a kind that is not read.
        RagBlendError: None could be read.
    """
    from rag_blend_app.documents import files_in, read

    files = files_in(paths)
    if (size := sum(path.stat().st_size for path in files)) > _MUCH_TEXT:
        from rag_blend.sizes import format_bytes

        complain(f"{len(files):,} files have {format_bytes(size)}: to read, split and count them takes minutes")
    reading = read(files, progress)
    for path, encoding in reading.converted.items():
        complain(f"{short(path)}: is not UTF-8, was read as {encoding}")
    for path, lost in reading.damaged.items():
        complain(f"{short(path)}: is damaged, {lost} of its characters are no UTF-8 and were read as U+FFFD")
    for path in reading.empty:
        complain(f"{short(path)}: has no text, is passed over")
    for path, reason in reading.unread.items():
        complain(f"{short(path)}: {reason}")
    if not reading.documents:
        raise RagBlendError("there is no text in any of the files")
    return reading


def short(path: str) -> str:
    """The path of a document as somebody who stands here would write it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def figures_of(reply: Reply) -> str:
    """Time and reuse of an answer, in a line."""
    stats = reply.figures
    return (
        f"first token after {stats['ttft_s']:.2f} s; prompt {stats['prompt_tokens']:,} tokens: "
        f"{stats['prefix_tokens'] + stats['reused_tokens']:,} reused, "
        f"{stats['recomputed_tokens']:,} recomputed, {stats['fresh_tokens']:,} fresh"
    )
