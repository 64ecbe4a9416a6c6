"""PrecomputeKV: a document transformer that caches what passes through it."""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from rag_blend_frameworks.threads import call_in_thread

from langchain_rag_blend.base import BlendModel
from langchain_rag_blend.document_cache import DocumentCache
from langchain_rag_blend.head import HeadSource


class PrecomputeKV(BaseDocumentTransformer):
    """Caches documents, after the text splitter and before any vector store, and hands them on unchanged.

    Nothing tells it of deletions; `BlendVectorStore` hears of those, too.

    Example:
        ```python
        chunks = PrecomputeKV(llm, prompt=prompt).transform_documents(splitter.split_documents(documents))
        store = FAISS.from_documents(chunks, embedding)
        ```
    """

    def __init__(
        self,
        llm: BlendModel,
        prompt: HeadSource | None = None,
        *,
        variable: str = "context",
        tools: Sequence[Any] = (),
        id_key: str | None = None,
        show_progress: bool = False,
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            llm: The `ChatBlend` or `BlendLLM` that will read the documents.
            prompt: The template, chain or text that will stand in front of them, see `ChatBlend.head_of`; None: what
                `llm.learn_head` was told, else any.
            variable: The template's variable for them.
            tools: Tools that the model is bound to.
            id_key: Metadata key under whose value a document is filed, for `engine.forget`; None: its own id.
            show_progress: Show a progress bar.
        """
        self._cache = DocumentCache(llm, prompt, variable, tools, show_progress)
        self._id_key = id_key

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Cache documents.

        Raises:
            ValueError: The prompt has no fixed head; see `ChatBlend.head_of`.
            OSError: The storage refused, or there is no such model.
        """
        self._cache.ingest(documents, [self._id_of(document) for document in documents])
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Cache documents beside the event loop; see `transform_documents`."""
        return await call_in_thread(lambda: self.transform_documents(documents))

    def _id_of(self, document: Document) -> str | None:
        return document.id if self._id_key is None else str(document.metadata[self._id_key])
