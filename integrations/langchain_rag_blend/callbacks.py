"""BlendCallbackHandler: hears of retrieved documents before the model does."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from langchain_rag_blend.base import BlendModel


class BlendCallbackHandler(BaseCallbackHandler):
    """Has the caches of retrieved documents fetched early, and documents that were met for the first time cached.

    With it an existing vector store needs no wrapper and no second pass over its documents: what is retrieved is
    cached after the answer, when the model is idle, and reused from the next time on. It never blocks, and nothing
    depends on it.

    Pass it to a chain with `config={"callbacks": [handler]}`, or call `install()` once. A handler that is given to the
    model alone hears nothing of retrievers. Searching a store directly, without a retriever, fires no callback; a
    `BlendVectorStore` notices that as well.
    """

    def __init__(self, llm: BlendModel, *, prefetch: bool = True, write_through: bool = True) -> None:
        """Listen for one model.

        Args:
            llm: The `ChatBlend` or `BlendLLM` that answers.
            prefetch: Fetch caches from a far tier as soon as their documents are retrieved.
            write_through: Cache documents that are not cached yet.
        """
        self._llm = llm
        self._prefetch = prefetch
        self._write_through = write_through
        self._installed = False
        self._active = True

    def install(self) -> "BlendCallbackHandler":
        """Listen to every chain of this process from now on; returns the handler."""
        self._active = True
        if not self._installed:
            self._installed = True
            # A default, not a value: so it holds in every thread and task.
            variable = ContextVar[BlendCallbackHandler | None]("rag_blend_handler", default=self)
            register_configure_hook(variable, inheritable=True)
        return self

    def uninstall(self) -> None:
        """Listen no more."""
        self._active = False

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Take note of what was retrieved."""
        if not self._active:
            return
        if self._write_through:
            self._llm.contexts.retrieved(documents)
        engine = self._llm.loaded_engine
        if self._prefetch and engine is not None:
            engine.prefetch([document.page_content for document in documents])
