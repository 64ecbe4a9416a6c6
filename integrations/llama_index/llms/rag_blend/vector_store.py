"""A vector store that keeps the KV caches in step with the nodes it stores.

Every way into or out of a LlamaIndex index passes its vector store: `from_documents`, `insert`,
`insert_nodes`, `refresh_ref_docs`, `delete_ref_doc`, `delete_nodes` and ingestion pipelines.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.rag_blend.node_cache import NodeCache, nodes_of_index
from rag_blend_frameworks.threads import call_in_thread

from rag_blend import IngestReport

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM


class BlendVectorStore(BasePydanticVectorStore):
    """Passes everything on to an inner store and caches what is added, erases what is deleted.

    The inner store always goes first: when it fails, nothing is cached and nothing is erased. A failing cache
    never fails an addition (a warning says why; those chunks are then prefilled at query time). A failing
    erasure is raised, because somebody asked for the data to be gone.

    Whatever is not listed here is the inner store's own attribute.
    """

    _inner: BasePydanticVectorStore = PrivateAttr()
    _cache: NodeCache = PrivateAttr()

    def __init__(
        self,
        inner: BasePydanticVectorStore,
        llm: "BlendLLM",
        head: Sequence[int] | None = None,
        show_progress: bool = False,
    ) -> None:
        """Wrap a store.

        Args:
            inner: The store that keeps the embeddings.
            llm: Whose engine caches the nodes' texts.
            head: Token ids in front of the context; None: those of LlamaIndex's default query engine.
            show_progress: Show a progress bar when nodes are added.
        """
        super().__init__(stores_text=inner.stores_text, is_embedding_query=inner.is_embedding_query)
        self._inner = inner
        self._cache = NodeCache(llm, inner, head, show_progress)

    def __getattr__(self, name: str) -> Any:
        """Fall through to the inner store."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it from type checkers
        except AttributeError:
            if name.startswith("__") or name in type(self).__private_attributes__:
                raise
            return getattr(self._inner, name)

    @classmethod
    def class_name(cls) -> str:
        """Return the name used in serialised components."""
        return "BlendVectorStore"

    @property
    def inner(self) -> BasePydanticVectorStore:
        """The wrapped store."""
        return self._inner

    @property
    def client(self) -> Any:
        """The inner store's client."""
        return self._inner.client

    # -- in --

    def add(self, nodes: Sequence[BaseNode], **kwargs: object) -> list[str]:
        """Add nodes to the store, then cache their texts.

        Args:
            nodes: Nodes with embeddings.
            **kwargs: For the inner store.

        Returns:
            The inner store's ids.
        """
        ids = self._inner.add(nodes, **kwargs)
        self._cache.added(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: object) -> list[str]:
        """Add nodes without blocking the event loop while they are cached.

        Args:
            nodes: Nodes with embeddings.
            **kwargs: For the inner store.

        Returns:
            The inner store's ids.
        """
        ids = await self._inner.async_add(nodes, **kwargs)
        await call_in_thread(lambda: self._cache.added(nodes))
        return ids

    # -- out --

    def delete(self, ref_doc_id: str, **delete_kwargs: object) -> None:
        """Delete a document from the store, then erase its caches.

        Args:
            ref_doc_id: The document's id.
            **delete_kwargs: For the inner store.
        """
        self._inner.delete(ref_doc_id, **delete_kwargs)
        self._cache.document_deleted(ref_doc_id)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: object) -> None:
        """Delete a document from the store, then erase its caches.

        Args:
            ref_doc_id: The document's id.
            **delete_kwargs: For the inner store.
        """
        await self._inner.adelete(ref_doc_id, **delete_kwargs)
        await call_in_thread(lambda: self._cache.document_deleted(ref_doc_id))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: object,
    ) -> None:
        """Delete nodes from the store, then erase their caches.

        Args:
            node_ids: Ids of the nodes.
            filters: Or a condition on their metadata.
            **delete_kwargs: For the inner store.
        """
        doomed = self._cache.find(node_ids, filters)
        self._inner.delete_nodes(node_ids, filters, **delete_kwargs)
        self._cache.nodes_deleted(doomed)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: object,
    ) -> None:
        """Delete nodes from the store, then erase their caches.

        Args:
            node_ids: Ids of the nodes.
            filters: Or a condition on their metadata.
            **delete_kwargs: For the inner store.
        """
        doomed = await call_in_thread(lambda: self._cache.find(node_ids, filters))
        await self._inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        await call_in_thread(lambda: self._cache.nodes_deleted(doomed))

    def clear(self) -> None:
        """Empty the store, then erase the caches of its documents."""
        self._inner.clear()
        self._cache.cleared()

    async def aclear(self) -> None:
        """Empty the store, then erase the caches of its documents."""
        await self._inner.aclear()
        await call_in_thread(self._cache.cleared)

    # -- everything else is the inner store's --

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes of the inner store."""
        return self._inner.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes of the inner store."""
        return await self._inner.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: object) -> VectorStoreQueryResult:
        """Query the inner store."""
        return self._inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: object) -> VectorStoreQueryResult:
        """Query the inner store."""
        return await self._inner.aquery(query, **kwargs)

    def persist(self, persist_path: str | None = None, fs: object = None) -> None:
        """Save the inner store, in its own default place if none is given."""
        place: dict[str, str] = {} if persist_path is None else {"persist_path": persist_path}
        self._inner.persist(fs=fs, **place)

    # -- binding to an index --

    def layer_for(self, llm: "BlendLLM") -> "BlendVectorStore | None":
        """Return the wrapper that caches for `llm` among this one and those inside it."""
        if self._cache.llm is llm:
            return self
        return self._inner.layer_for(llm) if isinstance(self._inner, BlendVectorStore) else None

    def bind(self, index: BaseIndex[Any], head: Sequence[int], show_progress: bool) -> IngestReport:
        """Use the index's docstore for the nodes' texts, set the head, and cache what the index holds.

        Args:
            index: The index that this store belongs to.
            head: Token ids in front of the context.
            show_progress: Show progress bars, now and later.

        Returns:
            What was cached now.
        """
        return self._cache.bind(nodes_of_index(index, self._inner), head, show_progress)


def attach_index(llm: "BlendLLM", index: BaseIndex[Any], head: Sequence[int], show_progress: bool) -> IngestReport:
    """Wrap an index's vector store unless that is done already, and cache what the index holds.

    Args:
        llm: Whose engine caches the texts.
        index: A vector index.
        head: Token ids in front of the context.
        show_progress: Show progress bars, now and later.

    Returns:
        What was cached now.

    Raises:
        TypeError: The index has no vector store.
    """
    store = getattr(index, "_vector_store", None)
    if not isinstance(store, BasePydanticVectorStore) or not hasattr(index, "vector_store"):
        kind = type(index).__name__
        raise TypeError(f"attach needs an index with a vector store, such as VectorStoreIndex, not {kind}")
    layer = store.layer_for(llm) if isinstance(store, BlendVectorStore) else None
    if layer is not None:
        return layer.bind(index, head, show_progress)
    wrapper = BlendVectorStore(store, llm, head, show_progress)
    # Wrapped first, so that a node added by another thread meanwhile is not missed.
    index._vector_store = wrapper
    try:
        return wrapper.bind(index, head, show_progress)
    except BaseException:
        index._vector_store = store
        raise
