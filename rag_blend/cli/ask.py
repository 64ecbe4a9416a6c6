"""``rag-blend ask``: one question to a collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rag_blend_app.terminal import printable

from rag_blend.cli.collection import (
    IndexOption,
    MovedModelOption,
    StorageOption,
    TokensOption,
    TopKOption,
    conversation_with,
    figures_of,
    print_answer,
    short,
)
from rag_blend.cli.common import JsonOption, OwnDtypeOption, user_errors

if TYPE_CHECKING:
    from rag_blend_app.conversation import Reply

_SNIPPET = 90  # characters of a source


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="In quotes.")],
    storage: StorageOption = "kv",
    index: IndexOption = None,
    model: MovedModelOption = None,
    top_k: TopKOption = 4,
    max_new_tokens: TokensOption = 256,
    dtype: OwnDtypeOption = None,
    full: Annotated[bool, typer.Option("--full", help="Answer by full prefill, to compare with.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from what was ingested; show where from, how fast, and how much was reused.

    The exit status is 1 if nothing in the collection resembles the question.

    Example: rag-blend ask "What is the warranty period?" --storage kv
    """
    with user_errors("app"), conversation_with(storage, index, model, top_k, max_new_tokens, dtype) as conversation:
        if not print_answer(conversation, question, as_json, _show, full):
            raise typer.Exit(1)


def _show(reply: Reply) -> None:
    typer.echo("\n")
    for number, source in enumerate(reply.sources, 1):
        begin = " ".join(source.text.split())[:_SNIPPET]
        typer.echo(printable(f"[{number}] {short(source.document)}, likeness {source.score:.2f}: {begin}"))
    typer.echo(figures_of(reply))
    if reply.figures["note"]:
        typer.echo(reply.figures["note"])
