"""Errors that LlamaIndex must not take for an empty answer."""

from collections.abc import Iterator
from contextlib import contextmanager

from rag_blend import RagBlendError


@contextmanager
def not_swallowed() -> Iterator[None]:
    """Let a complaint about arguments reach the user.

    LlamaIndex's refine step, and so its default query engine, catches ValueError and TypeError (it expects them of a
    structured answer), logs them and answers "Empty Response". RagBlendError passes.

    Raises:
        RagBlendError: Instead of a ValueError or TypeError raised inside.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RagBlendError(str(error)) from error
