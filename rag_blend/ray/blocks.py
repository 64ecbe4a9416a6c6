"""A collection as a Ray data set whose blocks are what workers are given."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_blend.errors import install_hint
from rag_blend.ray.source import Chunk, Item, blocks_of, chunks_of

try:
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet
    import ray.data
    from ray.data import Dataset
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('ray')}", name=missing.name) from None

_TEXT, _DOCUMENT = "text", "doc_id"  # columns
_READERS = {".jsonl": pyarrow.json.read_json, ".parquet": pyarrow.parquet.read_table}
_SAMPLED = 10_000  # chunks; priming texts are drawn from a few dozen


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is handed out.

    Attributes:
        dataset: Rows with a text and, perhaps, a document id.
        batch_size: Rows that are handed out at once; None: the data set's own blocks.
        sample: The first chunks, from which priming texts are drawn.
        num_chunks: How many there are, if that is known.
    """

    dataset: Dataset
    batch_size: int | None
    sample: Sequence[Chunk]
    num_chunks: int | None

    @property
    def is_read(self) -> bool:
        """Whether all of it is there, so that nothing has to be read meanwhile."""
        return self.num_chunks is not None


def blocks_from(
    source: Iterable[Item] | os.PathLike[str] | Dataset,
    doc_ids: Sequence[str] | None,
    size: int,
    whole_documents: bool,
) -> Blocks:
    """Cut a collection into blocks; see `rag_blend.ray.ingest` for what it may be.

    Args:
        source: The collection.
        doc_ids: One id per item, instead of their own.
        size: Chunks per block.
        whole_documents: Do not cut documents.

    Raises:
        TypeError: Something in it cannot be ingested.
        ValueError: It has not the right columns or ids, or its documents cannot be kept whole.
    """
    if doc_ids is not None and isinstance(source, Dataset | os.PathLike):
        raise ValueError(f"document ids of a file or data set are its column {_DOCUMENT!r}, not doc_ids")
    if isinstance(source, Dataset):
        if whole_documents:
            raise ValueError("prime='preceding' needs whole documents in their order: pass a list or a file")
        sample = source.limit(_SAMPLED).take_batch(_SAMPLED, batch_format="pyarrow")
        return Blocks(source, size, chunks_in(sample), None)
    chunks = _read(Path(source)) if isinstance(source, os.PathLike) else chunks_of(source, doc_ids)
    tables = [_table_of(block) for block in blocks_of(chunks, size, whole_documents)]
    return Blocks(ray.data.from_arrow(tables or [_table_of([])]), None, chunks[:_SAMPLED], len(chunks))


def chunks_in(table: pa.Table) -> list[Chunk]:
    """The chunks in the rows of a table.

    Raises:
        ValueError: It has no column of texts.
    """
    if _TEXT not in table.column_names:
        raise ValueError(f"no column {_TEXT!r} among {', '.join(table.column_names)}: rename the one with the chunks")
    texts = table.column(_TEXT).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"column {_TEXT!r} holds something else than texts")
    documents = table.column(_DOCUMENT).to_pylist() if _DOCUMENT in table.column_names else [""] * len(texts)
    return [Chunk(text, str(document or "")) for text, document in zip(texts, documents, strict=True)]


def _read(path: Path) -> list[Chunk]:
    if path.suffix not in _READERS:
        raise ValueError(
            f"cannot read {path.name}: pass a {' or '.join(_READERS)} file with a chunk in each row, or a "
            "ray.data.Dataset; documents are read and cut by `rag-blend ingest --ray`"
        )
    return chunks_in(_READERS[path.suffix](path))


def _table_of(block: Sequence[Chunk]) -> pa.Table:
    columns = {_TEXT: [chunk.text for chunk in block], _DOCUMENT: [chunk.document for chunk in block]}
    return pa.table(columns, schema=pa.schema([(name, pa.large_string()) for name in columns]))
