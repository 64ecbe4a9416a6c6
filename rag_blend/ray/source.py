"""What can be ingested in bulk, as chunks with the ids of their documents, and cut into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Node(Protocol):
    """A LlamaIndex node, as far as it matters here."""

    @property
    def node_id(self) -> str:
        """Its own id."""

    @property
    def ref_doc_id(self) -> str | None:
        """The document that it was cut from."""

    def get_content(self, metadata_mode: Any = ...) -> str:
        """Its text, with those lines of metadata that the mode asks for."""


@runtime_checkable
class Document(Protocol):
    """A LangChain document, as far as it matters here."""

    @property
    def page_content(self) -> str:
        """Its text."""

    @property
    def id(self) -> str | None:
        """Its own id."""


Item = str | Node | Document


class Chunk(NamedTuple):
    """A text as it will stand in prompts, and the document it belongs to, "" for none."""

    text: str
    document: str


def chunks_of(items: Iterable[Item], doc_ids: Sequence[str] | None = None) -> list[Chunk]:
    """Texts, nodes and documents as the integrations cache them.

    Args:
        items: The chunks.
        doc_ids: One id per item, instead of their own.

    Raises:
        TypeError: One is something else.
        ValueError: `doc_ids` and `items` differ in length.
    """
    if isinstance(items, str):
        raise TypeError("one text is not a collection: pass a list of texts")
    chunks = [_chunk_of(item) for item in items]
    if doc_ids is None:
        return chunks
    if len(doc_ids) != len(chunks):
        raise ValueError(f"{len(chunks)} texts, but {len(doc_ids)} doc_ids")
    return [Chunk(chunk.text, document) for chunk, document in zip(chunks, doc_ids, strict=True)]


def blocks_of(chunks: Iterable[Chunk], size: int, whole_documents: bool) -> Iterator[list[Chunk]]:
    """Chunks in blocks of at most `size`; with whole documents, more where a document has more."""
    block: list[Chunk] = []
    for group in _documents_in(chunks) if whole_documents else ([chunk] for chunk in chunks):
        if block and len(block) + len(group) > size:
            yield block
            block = []
        block += group
    if block:
        yield block


def _documents_in(chunks: Iterable[Chunk]) -> Iterable[list[Chunk]]:
    """The chunks of each document in their order; those without one each alone."""
    documents: dict[str | int, list[Chunk]] = {}
    alone = count()
    for chunk in chunks:
        documents.setdefault(chunk.document or next(alone), []).append(chunk)
    return documents.values()


def _chunk_of(item: Item) -> Chunk:
    if isinstance(item, str):
        return Chunk(item, "")
    if isinstance(item, Node):
        return Chunk(item.get_content(metadata_mode="llm").strip(), item.ref_doc_id or item.node_id)
    if isinstance(item, Document):
        return Chunk(item.page_content.strip(), item.id or "")
    raise TypeError(
        f"cannot ingest a {type(item).__name__}: pass texts, LlamaIndex nodes, LangChain documents, a .jsonl or "
        ".parquet file of chunks, or a ray.data.Dataset; documents are read and cut by `rag-blend ingest --ray`"
    )
