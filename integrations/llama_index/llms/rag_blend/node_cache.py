"""Which nodes are cached for an index, and what to cache or erase when they change."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llama_index.core.async_utils import asyncio_run
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn
from llama_index.llms.rag_blend.nodes import document_of, ingest_nodes, total

from rag_blend import IngestReport

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM

logger = logging.getLogger(__name__)

# Holds on to the remaining chunks of a document while one of its chunks is erased. The separator cannot
# stand in a readable document id.
_KEPT = "\x1fkept"


class NodeSource(Protocol):
    """Where the texts of stored nodes can be read again."""

    def all(self) -> list[BaseNode]:
        """Return all nodes of the index."""

    def some(self, node_ids: Sequence[str]) -> list[BaseNode]:
        """Return those of the nodes that still exist."""


class _DocstoreNodes:
    """Nodes of an index whose vector store keeps embeddings only.

    The index struct decides which nodes there are: a docstore can be shared, and keeps deleted documents
    unless it is told otherwise.
    """

    def __init__(self, index: BaseIndex[Any]) -> None:
        self._index = index

    def all(self) -> list[BaseNode]:
        return self.some(list(self._index.index_struct.nodes_dict.values()))

    def some(self, node_ids: Sequence[str]) -> list[BaseNode]:
        return self._index.docstore.get_nodes(list(node_ids), raise_error=False)


class _StoreNodes:
    """Nodes of a vector store that keeps the texts as well."""

    def __init__(self, store: BasePydanticVectorStore) -> None:
        self._store = store

    def all(self) -> list[BaseNode]:
        return self._get()

    def some(self, node_ids: Sequence[str]) -> list[BaseNode]:
        # An empty list means "no condition" to some stores.
        return self._get(list(node_ids)) if node_ids else []

    def _get(self, node_ids: list[str] | None = None) -> list[BaseNode]:
        try:
            return self._store.get_nodes(node_ids=node_ids)
        except Exception as error:
            try:  # a store made with an asynchronous client only
                return list(asyncio_run(self._store.aget_nodes(node_ids=node_ids)))
            except Exception:
                raise error from None


def nodes_of_index(index: BaseIndex[Any], store: BasePydanticVectorStore) -> NodeSource:
    """Return where an index keeps its nodes: the docstore, or the vector store itself."""
    if store.stores_text and not getattr(index, "_store_nodes_override", False):
        return _StoreNodes(store)
    return _DocstoreNodes(index)


class NodeCache:
    """Keeps the engine's caches in step with the nodes of one vector store.

    A chunk is filed under its source document, so that erasing a document by its id works from here, from the
    engine and from the command line alike, and also reaches chunks of earlier runs.

    Args:
        llm: Whose engine caches the texts.
        store: The vector store that the nodes are in.
        head: Token ids in front of the context; None: found out when first needed. `bind` adds more.
        show_progress: Show progress bars.
    """

    def __init__(
        self, llm: "BlendLLM", store: BasePydanticVectorStore, head: Sequence[int] | None, show_progress: bool
    ) -> None:
        """Start with no nodes known."""
        self.llm = llm
        self._store = store
        self._heads = [] if head is None else [list(head)]
        self._show_progress = show_progress
        self._source: NodeSource = _StoreNodes(store)
        self._live: dict[str, str] = {}  # node id -> document id, of all nodes known to be in the store

    def bind(self, source: NodeSource, head: Sequence[int], show_progress: bool) -> IngestReport:
        """Take over an index: remember where its nodes are and cache those that are there behind one more head.

        Args:
            source: Where the index keeps its nodes.
            head: Token ids in front of the context.
            show_progress: Show progress bars, now and later.

        Returns:
            What was cached.
        """
        self._source, self._show_progress = source, show_progress
        if list(head) not in self._heads:
            self._heads.append(list(head))
        try:
            nodes = source.all()
        except NotImplementedError:
            logger.warning(
                "%s cannot list its nodes: only what is added from now on is cached. Attach before adding "
                "documents, or build the index with store_nodes_override=True.",
                type(self._store).__name__,
            )
            nodes = []
        self._remember(nodes)
        return ingest_nodes(self.llm, nodes, head, show_progress)

    # -- the store has changed --

    def added(self, nodes: Sequence[BaseNode]) -> None:
        """Cache nodes that the store has accepted. Never raises: a missing cache only costs time."""
        self._remember(nodes)
        self._try_ingest(nodes, "Their answers come from a full prefill.")

    def document_deleted(self, doc_id: str) -> None:
        """Erase the caches of a document."""
        doomed = [node_id for node_id, doc in list(self._live.items()) if doc == doc_id]
        if not doomed and doc_id in self._live:
            # Some stores (FaissMapVectorStore) take a node id here.
            self.nodes_deleted({doc_id: self._live[doc_id]})
            return
        self._drop(doomed)
        self._forget([doc_id])

    def nodes_deleted(self, doomed: Mapping[str, str]) -> None:
        """Erase the caches of single nodes and keep those of the rest of their documents.

        The engine erases by document. The remaining chunks are filed under a second id for the moment; they
        are found in the store by their content, so nothing is computed again.

        Args:
            doomed: Node id -> document id, as returned by `find` before the deletion.
        """
        self._drop(doomed)
        docs = set(doomed.values())
        rest = self._read([node_id for node_id, doc in list(self._live.items()) if doc in docs])
        if not rest:
            self._forget(docs)
            return
        self._try_ingest(rest, "They are cached again at the next attach.", suffix=_KEPT)
        renewed = self._erase(docs)
        self._try_ingest(rest, "They are cached again at the next attach.")
        renewed |= self._erase(doc + _KEPT for doc in docs)
        if renewed:
            self._renew()

    def cleared(self) -> None:
        """Erase the caches of all nodes."""
        docs = set(self._live.values())
        self._live.clear()
        self._forget(docs)

    def find(self, node_ids: Sequence[str] | None, filters: MetadataFilters | None) -> dict[str, str]:
        """Find out which nodes a deletion will hit; to be called before it.

        Args:
            node_ids: Ids of the nodes; None: any.
            filters: Condition on their metadata; None: no condition.

        Returns:
            Node id -> document id. Empty, with a warning, where the store offers no way to tell.
        """
        wanted = list(self._live) if node_ids is None else list(node_ids)
        if filters is None:
            known = {node_id: self._live[node_id] for node_id in wanted if node_id in self._live}
            unknown = [node_id for node_id in wanted if node_id not in known]
            return known | {node.node_id: document_of(node) for node in self._read(unknown)}
        return {node.node_id: document_of(node) for node in self._matching(wanted, filters)}

    # -- helpers --

    def _matching(self, node_ids: Sequence[str], filters: MetadataFilters) -> list[BaseNode]:
        """Return the nodes that meet the filters, judged by LlamaIndex's own filter function."""
        nodes = {node.node_id: node for node in self._read(node_ids)}
        meets = build_metadata_filter_fn(lambda node_id: nodes[node_id].metadata, filters)
        return [node for node_id, node in nodes.items() if meets(node_id)]

    def _remember(self, nodes: Iterable[BaseNode]) -> None:
        self._live.update({node.node_id: document_of(node) for node in nodes})

    def _drop(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._live.pop(node_id, None)

    def _read(self, node_ids: Sequence[str]) -> list[BaseNode]:
        if not node_ids:
            return []
        try:
            return self._source.some(node_ids)
        except Exception as error:
            logger.warning("Cannot read %d nodes back from the store (%s)", len(node_ids), _reason(error))
            return []

    def _ingest(self, nodes: Sequence[BaseNode], suffix: str = "") -> IngestReport:
        if not self._heads:
            self._heads.append(self.llm.head())
        progress = self._show_progress and not suffix
        return total(ingest_nodes(self.llm, nodes, head, progress, suffix) for head in list(self._heads))

    def _try_ingest(self, nodes: Sequence[BaseNode], consequence: str, suffix: str = "") -> None:
        if not nodes:
            return
        try:
            self._ingest(nodes, suffix)
        except Exception as error:
            logger.warning("Caching %d nodes failed (%s). %s", len(nodes), _reason(error), consequence)

    def _forget(self, docs: Iterable[str]) -> None:
        """Erase documents for good."""
        # An interrupted `nodes_deleted` can have left chunks under the second id.
        if self._erase(doc + suffix for doc in docs for suffix in ("", _KEPT)):
            self._renew()

    def _erase(self, docs: Iterable[str]) -> bool:
        """Erase documents; return whether all other chunks of the namespace have to be cached again."""
        doomed = list(docs)
        return bool(doomed) and self.llm.engine.forget(doomed).prime_renewed

    def _renew(self) -> None:
        """Cache all nodes again: the text that they were primed with was part of a deleted document."""
        logger.warning(
            "The sample text that all chunks were primed with was part of a deleted document and has been "
            "replaced. This index is being cached again; attach other indexes of this namespace again."
        )
        self._try_ingest(self._read(list(self._live)), "Attach the index again.")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
