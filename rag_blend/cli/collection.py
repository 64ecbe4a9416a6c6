"""What the commands around a collection share: their options, where a collection is, and how an answer is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.common import checked_dtype
from rag_blend.errors import RagBlendError

if TYPE_CHECKING:
    from rag_blend_app.conversation import Conversation, Reply
    from rag_blend_app.documents import Reading

PathsArgument = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Directories, or .txt, .md, .rst, .html and .pdf files.")
]
StoreOption = Annotated[
    str, typer.Option("--store", metavar="STORE", help="Where KV caches live: a directory, or a URL with --index.")
]
IndexOption = Annotated[
    Path | None,
    typer.Option("--index", metavar="DIR", help="Where chunks and vectors live; default: STORE-index."),
]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk-tokens", min=32, help="Longest chunk, in the model's tokens; default: 512.")
]
CodecOption = Annotated[str, typer.Option("--codec", help="How caches are written down: raw, zstd, int8, int4.")]
MovedModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="If the model has moved; default: as ingested.")
]
TopKOption = Annotated[int, typer.Option("--top-k", min=1, help="Chunks per prompt.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]


def index_of(store: str, index: Path | None) -> Path:
    """The directory of the collection that belongs to a store.

    Raises:
        ValueError: The store is no directory, so that nothing lies beside it.
    """
    if index is not None:
        return index
    if "://" in store:
        raise ValueError("a store that is no directory needs --index DIR, for chunks and vectors")
    directory = Path(store).absolute()
    return directory.with_name(f"{directory.name}-index")


@contextmanager
def conversation_with(
    store: str,
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

    directory = index_of(store, index)
    facts = facts_of(directory)
    if facts is None:
        raise RagBlendError(
            f"there is no collection in {str(directory)!r}; make one: "
            f"rag-blend ingest DIR --model MODEL --store {store}{or_else}"
        )
    facts = replace(facts, model=model or facts.model)
    with closing(llm_for(facts, store, max_new_tokens, dtype=checked_dtype(dtype))) as llm:
        yield Conversation(Collection.load(directory, facts), llm, top_k)


def print_answer(conversation: Conversation, question: str, as_json: bool, show: Callable[[Reply], None]) -> bool:
    """Print an answer as it comes, and `show` what is known of it then; or print all of it as a line of JSON.

    Returns:
        Whether there is one: False if nothing resembles the question, which is told.
    """
    reply = conversation.look_up(question)
    if not reply.sources:
        typer.echo("rag-blend: nothing in the collection resembles the question", err=True)
        return False
    for piece in conversation.answer(reply):
        if not as_json:
            typer.echo(piece, nl=False)
    if as_json:
        sources = [asdict(source) for source in reply.sources]
        record = {"question": reply.question, "answer": reply.text, "sources": sources, "stats": reply.figures}
        typer.echo(json.dumps(record))
    else:
        show(reply)
    return True


def read_documents(paths: Sequence[Path], progress: bool) -> Reading:
    """Documents of files; those that cannot be read are told of.

    Raises:
        OSError: There are none.
        ValueError: One is of a kind that is not read.
        RagBlendError: None could be read.
    """
    from rag_blend_app.documents import files_in, read

    reading = read(files_in(paths), progress)
    for path, reason in reading.unread.items():
        typer.echo(f"rag-blend: {short(path)}: {reason}", err=True)
    if not reading.documents:
        raise RagBlendError("none of the files could be read")
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
