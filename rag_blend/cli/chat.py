"""``rag-blend chat``: questions to a collection, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from rag_blend.cli.common import OwnDtypeOption, user_errors

if TYPE_CHECKING:
    from rag_blend_app.conversation import Reply


def chat(
    storage: StorageOption = "kv",
    index: IndexOption = None,
    model: MovedModelOption = None,
    top_k: TopKOption = 4,
    max_new_tokens: TokensOption = 256,
    dtype: OwnDtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per answer.")] = False,
) -> None:
    """Like ask, again and again, with the conversation in mind. An empty line or Ctrl-D ends it, Ctrl-C an answer.

    Questions may also be piped in, one a line; then empty lines are passed over, and Ctrl-C ends everything.

    Example: rag-blend chat --storage kv
    """
    with user_errors("app"), conversation_with(storage, index, model, top_k, max_new_tokens, dtype) as conversation:
        for question in _questions():
            try:
                print_answer(conversation, question, as_json, _show)
            except KeyboardInterrupt:
                if not _at_a_terminal():
                    raise
                typer.echo(" (stopped)")


def _questions() -> Iterator[str]:
    """From the terminal, with editing; or from a pipe."""
    if not _at_a_terminal():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401  # input() then has keys that move and a history

    while question := _typed():
        yield question


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _typed() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return ""


def _show(reply: Reply) -> None:
    names = ", ".join(dict.fromkeys(short(source.document) for source in reply.sources))
    typer.secho(f"\n[{printable(names)}; {figures_of(reply)}]\n", dim=True)
