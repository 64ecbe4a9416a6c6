"""A vector store that keeps the KV caches in step with the documents it stores.

Every way into or out of a LangChain vector store passes `add_documents`, `add_texts`, `delete` and their async twins,
`index()` with a record manager included.
"""

import logging
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from rag_blend_frameworks.threads import call_in_thread

from langchain_rag_blend.base import BlendModel
from langchain_rag_blend.document_cache import DocumentCache
from langchain_rag_blend.head import HeadSource

logger = logging.getLogger(__name__)


class BlendVectorStore(VectorStore):
    """Passes everything on to an inner store and caches what is added, erases what is deleted or overwritten.

    The inner store always goes first: when it fails, nothing is cached and nothing is erased. A failing cache never
    fails an addition (a warning says why; those documents are then prefilled at query time). A failing erasure is
    raised, because somebody asked for the data to be gone.

    Documents that are found but were never cached (they were in the inner store before) are cached after the answer,
    when the model is idle, unless `write_through` is False.

    Whatever is not listed here is the inner store's own attribute.
    """

    def __init__(
        self,
        inner: VectorStore,
        llm: BlendModel,
        prompt: HeadSource | None = None,
        *,
        variable: str = "context",
        tools: Sequence[Any] = (),
        write_through: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Wrap a store; nothing is loaded yet.

        Args:
            inner: The store that keeps the embeddings.
            llm: The `ChatBlend` or `BlendLLM` that will read the documents.
            prompt: The template, chain or text that will stand in front of them, see `ChatBlend.head_of`; None: what
                `llm.learn_head` was told, else any.
            variable: The template's variable for them.
            tools: Tools that the model is bound to.
            write_through: Cache what is found and not cached yet.
            show_progress: Show a progress bar when documents are added.
        """
        self._inner = inner
        self._cache = DocumentCache(llm, prompt, variable, tools, show_progress)
        self._write_through = write_through
        self._live: dict[str, None] = {}  # ids of what is known to be in the store, in order of addition

    def __getattr__(self, name: str) -> Any:
        """Fall through to the inner store."""
        if name.startswith("__") or name == "_inner":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def inner(self) -> VectorStore:
        """The wrapped store."""
        return self._inner

    @property
    def embeddings(self) -> Embeddings | None:
        """The inner store's embedding model."""
        return self._inner.embeddings

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: BlendModel | None = None,
        prompt: HeadSource | None = None,
        inner: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> "BlendVectorStore":
        """Make an inner store of texts, wrap it, and cache the texts.

        Args:
            texts: The texts.
            embedding: The embedding model.
            metadatas: One per text.
            ids: One per text; None: new ones.
            llm: See the constructor; required.
            prompt: See the constructor.
            inner: Class of the inner store.
            kwargs: For the inner store's `from_texts`.

        Raises:
            ValueError: `llm` is missing.
        """
        if llm is None:
            raise ValueError("BlendVectorStore.from_texts needs the model that will read the texts: llm=...")
        names = [str(uuid.uuid4()) for _ in texts] if ids is None else ids
        store = cls(inner.from_texts(texts, embedding, metadatas, ids=names, **kwargs), llm, prompt)
        store._added([Document(text) for text in texts], names)
        return store

    # -- in --

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents to the store, then cache their texts.

        Args:
            documents: The documents.
            kwargs: For the inner store, `ids` among them.

        Returns:
            The inner store's ids.
        """
        old = self._overwritten(_given_ids(documents, kwargs))
        ids = self._inner.add_documents(documents, **kwargs)
        self._replaced(old, documents, ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents without blocking the event loop while they are cached; see `add_documents`."""
        old = await call_in_thread(lambda: self._overwritten(_given_ids(documents, kwargs)))
        ids = await self._inner.aadd_documents(documents, **kwargs)
        await call_in_thread(lambda: self._replaced(old, documents, ids))
        return ids

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts to the store, then cache them.

        Args:
            texts: The texts.
            metadatas: One per text.
            ids: One per text; None: the store's own.
            kwargs: For the inner store.

        Returns:
            The inner store's ids.
        """
        given = list(texts)
        old = self._overwritten(ids or [])
        kwargs |= {} if ids is None else {"ids": ids}  # some stores do not know the argument
        added = self._inner.add_texts(given, metadatas, **kwargs)
        self._replaced(old, [Document(text) for text in given], added)
        return added

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts without blocking the event loop while they are cached; see `add_texts`."""
        given = list(texts)
        old = await call_in_thread(lambda: self._overwritten(ids or []))
        kwargs |= {} if ids is None else {"ids": ids}
        added = await self._inner.aadd_texts(given, metadatas, **kwargs)
        await call_in_thread(lambda: self._replaced(old, [Document(text) for text in given], added))
        return added

    # -- out --

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents from the store, then erase their caches.

        Args:
            ids: Their ids; None: all, or those that the other arguments describe, as the inner store has it.
            kwargs: For the inner store.

        Returns:
            The inner store's answer; where it is False, nothing is erased.

        Raises:
            OSError: The caches could not be erased; call again to finish.
        """
        done = self._inner.delete(ids, **kwargs)
        if done is not False:
            self._deleted(ids)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents without blocking the event loop; see `delete`."""
        done = await self._inner.adelete(ids, **kwargs)
        if done is not False:
            await call_in_thread(lambda: self._deleted(ids))
        return done

    # -- what the caches have to follow --

    def _overwritten(self, ids: Iterable[str]) -> dict[str, str | None]:
        """Texts that are in the store under these ids, before something is added; None: unknown."""
        wanted = list(ids)
        if not wanted:
            return {}
        try:
            return {str(document.id): document.page_content for document in self._inner.get_by_ids(wanted)}
        except Exception:  # not every store can say
            return dict.fromkeys(wanted)

    def _replaced(self, old: dict[str, str | None], documents: Sequence[Document], ids: Sequence[str]) -> None:
        new = {id_: document.page_content for document, id_ in zip(documents, ids, strict=False)}
        changed = [id_ for id_, text in old.items() if id_ in new and text != new[id_]]
        self._live.update(dict.fromkeys(ids))
        if self._cache.forget(changed):
            self._cache_again(without=set(ids))
        self._added(documents, ids)

    def _added(self, documents: Sequence[Document], ids: Sequence[str]) -> None:
        self._live.update(dict.fromkeys(ids))
        known = ids if len(ids) == len(documents) else [document.id for document in documents]
        self._cache.try_ingest(documents, known)

    def _deleted(self, ids: Sequence[str] | None) -> None:
        doomed = self._gone() if ids is None else list(ids)
        for id_ in doomed:
            self._live.pop(id_, None)
        if self._cache.forget(doomed):
            self._cache_again()

    def _gone(self) -> list[str]:
        """Which of the known ids are not in the store any more; all of them where it cannot say."""
        try:
            left = {document.id for document in self._inner.get_by_ids(list(self._live))}
        except Exception:
            left = set()
        return [id_ for id_ in self._live if id_ not in left]

    def _cache_again(self, without: set[str] | frozenset[str] = frozenset()) -> None:
        """Cache all known documents again: the text that they were primed with was part of a deleted one."""
        logger.warning(
            "The sample text that all documents were primed with was part of a deleted one and has been replaced. "
            "What this process has added to the store is being cached again; add other documents again, or let them "
            "be cached when they are next retrieved."
        )
        try:
            documents = self._inner.get_by_ids([id_ for id_ in self._live if id_ not in without])
        except Exception as error:
            logger.warning("The store cannot give its documents back (%s: %s).", type(error).__name__, error)
            return
        self._cache.try_ingest(documents, [document.id for document in documents])

    def _found(self, documents: list[Document]) -> list[Document]:
        if self._write_through:
            self._cache.llm.contexts.retrieved(documents)
        return documents

    def _found_with_scores(self, hits: list[tuple[Document, float]]) -> list[tuple[Document, float]]:
        self._found([document for document, _ in hits])
        return hits

    # -- searches are the inner store's --

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents of the inner store."""
        return self._inner.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents of the inner store."""
        return await self._inner.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Search the inner store."""
        return self._found(self._inner.similarity_search(query, k, **kwargs))

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Search the inner store."""
        return self._found(await self._inner.asimilarity_search(query, k, **kwargs))

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Search the inner store."""
        return self._found(self._inner.similarity_search_by_vector(embedding, k, **kwargs))

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Search the inner store."""
        return self._found(await self._inner.asimilarity_search_by_vector(embedding, k, **kwargs))

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        """Search the inner store."""
        return self._found_with_scores(self._inner.similarity_search_with_score(*args, **kwargs))

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        """Search the inner store."""
        return self._found_with_scores(await self._inner.asimilarity_search_with_score(*args, **kwargs))

    def similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Search the inner store."""
        return self._found_with_scores(self._inner.similarity_search_with_relevance_scores(query, k, **kwargs))

    async def asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Search the inner store."""
        return self._found_with_scores(await self._inner.asimilarity_search_with_relevance_scores(query, k, **kwargs))

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search the inner store."""
        return self._found(self._inner.max_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs))

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search the inner store."""
        return self._found(await self._inner.amax_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs))

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search the inner store."""
        return self._found(
            self._inner.max_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, **kwargs)
        )

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Search the inner store."""
        return self._found(
            await self._inner.amax_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, **kwargs)
        )

    def _select_relevance_score_fn(self) -> Any:
        return self._inner._select_relevance_score_fn()


def _given_ids(documents: Sequence[Document], kwargs: dict[str, Any]) -> list[str]:
    """The ids under which documents will be stored, as far as the caller has chosen them."""
    ids = kwargs.get("ids")
    chosen = [document.id for document in documents] if ids is None else ids
    return [str(id_) for id_ in chosen if id_]
