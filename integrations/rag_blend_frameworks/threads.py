"""Run blocking engine calls beside an event loop, and stop them when nobody waits any more.

Each call gets a thread of its own instead of one from the loop's default executor: calls queue up inside the engine,
and a queue there must not starve the other users of that small pool (embeddings, vector stores).
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()


class _Failure:
    """An exception on its way through the queue."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def call_in_thread(call: Callable[[], T], cancel: threading.Event | None = None) -> T:
    """Await a blocking call without blocking the event loop.

    Args:
        call: The blocking call; it should return soon after `cancel` is set.
        cancel: Set when the awaiting task is cancelled; None: the call then runs to its end, unobserved.

    Returns:
        What the call returned. Its exceptions are raised here.
    """
    values = iterate_in_thread(lambda: iter([call()]), cancel or threading.Event())
    result = await anext(values)
    await values.aclose()
    return result


def iterate_in_thread(start: Callable[[], Iterator[T]], cancel: threading.Event) -> AsyncGenerator[T, None]:
    """Iterate over a blocking iterator without blocking the event loop.

    Nothing runs before the first item is awaited. The thread sees the context variables as they are now, so that
    events raised in it belong to the span that asked.

    Args:
        start: Makes the iterator; called in the thread because it may load the model.
        cancel: Set as soon as the consumer stops: end, `aclose()`, cancelled task or garbage collection.

    Returns:
        The items. An exception of the iterator is raised at the place where the next item was due.
    """
    return _iterate(start, cancel, contextvars.copy_context())


async def _iterate(
    start: Callable[[], Iterator[T]], cancel: threading.Event, context: contextvars.Context
) -> AsyncGenerator[T, None]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()

    def post(item: object) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the loop was closed: nobody will ever read this
            cancel.set()

    def pump() -> None:
        try:
            _drain(start(), post, cancel)
        except BaseException as error:
            post(_Failure(error))
        else:
            post(_END)

    threading.Thread(target=context.run, args=(pump,), name="rag-blend-call", daemon=True).start()
    try:
        while (item := await queue.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        cancel.set()


def _drain(items: Iterator[T], post: Callable[[T], None], cancel: threading.Event) -> None:
    """Post every item until the end or until cancelled, and close the iterator either way."""
    with contextlib.ExitStack() as stack:
        close = getattr(items, "close", None)
        if close is not None:
            stack.callback(close)
        for item in items:
            post(item)
            if cancel.is_set():
                return
