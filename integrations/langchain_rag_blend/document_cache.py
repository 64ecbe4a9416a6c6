"""Documents in, documents out: which texts are cached, under which ids, and what is erased."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from langchain_rag_blend.head import HeadSource
from rag_blend import IngestReport

if TYPE_CHECKING:
    from langchain_rag_blend.base import BlendModel

logger = logging.getLogger(__name__)


class DocumentCache:
    """Keeps the caches of one model's engine in step with documents.

    Cached is `page_content` without outer white space, as it stands in prompts; a prefix by a `document_prompt` does
    not matter, since reuse follows token ids. Each text is filed under the id of its document in the vector store.

    Args:
        llm: Whose engine caches.
        head: What stands in front of the documents in prompts; None: what `llm.learn_head` was told, else any head.
        variable: The prompt template's variable for the documents.
        tools: Tools that the model is bound to.
        show_progress: Show progress bars.
    """

    def __init__(
        self, llm: "BlendModel", head: HeadSource | None, variable: str, tools: Sequence[Any], show_progress: bool
    ) -> None:
        """Cache nothing yet."""
        self.llm = llm
        self._source, self._variable, self._tools = head, variable, tools
        self._head: list[int] | None = None
        self._show_progress = show_progress

    def ingest(self, documents: Sequence[Document], ids: Sequence[str | None]) -> IngestReport:
        """Cache documents.

        Args:
            documents: The documents.
            ids: What each is filed under; None: it cannot be forgotten by id.

        Raises:
            ValueError: The prompt has no fixed head; see `ChatBlend.head_of`.
            OSError: The storage refused, or there is no such model.
        """
        pairs = [
            (text, id_ or "")
            for document, id_ in zip(documents, ids, strict=True)
            if (text := document.page_content.strip())
        ]
        if not pairs:
            return IngestReport()
        texts, doc_ids = zip(*pairs, strict=True)
        return self.llm.get_engine().ingest(texts, head=self._head_ids(), doc_ids=doc_ids, progress=self._show_progress)

    def try_ingest(self, documents: Sequence[Document], ids: Sequence[str | None]) -> None:
        """Cache documents. A failure is logged: a missing cache only costs time."""
        try:
            self.ingest(documents, ids)
        except Exception as error:
            logger.warning(
                "Caching %d documents failed (%s: %s). Their answers come from a full prefill.",
                len(documents), type(error).__name__, error,
            )  # fmt: skip

    def forget(self, ids: Iterable[str]) -> bool:
        """Erase what is cached of documents.

        Returns:
            Whether all other documents of the namespace have to be cached again.

        Raises:
            OSError: The storage refused; call again to finish.
        """
        doomed = list(ids)
        if not doomed:
            return False
        self.llm.contexts.deleted(doomed)
        return self.llm.get_engine().forget(doomed).prime_renewed

    def _head_ids(self) -> Sequence[int] | None:
        if self._source is None:
            return self.llm.contexts.head
        if self._head is None:
            self._head = self.llm.head_of(self._source, variable=self._variable, tools=self._tools)
        return self._head or None
