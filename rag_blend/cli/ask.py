"""``rag-blend ask``: one question to a collection."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.collection import (
    NO_HITS,
    IndexOption,
    MovedModelOption,
    OwnDtypeOption,
    StoreOption,
    TokensOption,
    TopKOption,
    conversation_with,
    figures_of,
    record_of,
    short,
)
from rag_blend.cli.common import user_errors

if TYPE_CHECKING:
    from rag_blend_app.conversation import Reply

_SNIPPET = 90  # characters of a source


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="In quotes.")],
    store: StoreOption = "kv",
    index: IndexOption = None,
    model: MovedModelOption = None,
    top_k: TopKOption = 4,
    max_new_tokens: TokensOption = 256,
    dtype: OwnDtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer a question from what was ingested; show where from, how fast, and how much was reused.

    The exit status is 1 if nothing in the collection resembles the question.

    Example: rag-blend ask "What is the warranty period?" --store kv
    """
    with user_errors("app"), conversation_with(store, index, model, top_k, max_new_tokens, dtype) as conversation:
        reply = conversation.look_up(question)
        if not reply.sources:
            typer.echo(f"rag-blend: {NO_HITS}", err=True)
            raise typer.Exit(1)
        for piece in conversation.answer(reply):
            if not as_json:
                typer.echo(piece, nl=False)
        if as_json:
            typer.echo(json.dumps(record_of(reply)))
        else:
            _show(reply)


def _show(reply: Reply) -> None:
    typer.echo("\n")
    for number, source in enumerate(reply.sources, 1):
        begin = " ".join(source.text.split())[:_SNIPPET]
        typer.echo(f"[{number}] {short(source.document)}, likeness {source.score:.2f}: {begin}")
    typer.echo(figures_of(reply))
    if reply.figures["note"]:
        typer.echo(reply.figures["note"])
