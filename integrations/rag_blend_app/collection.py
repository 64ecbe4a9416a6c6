"""Documents, cut into chunks and found again by vectors: a LlamaIndex index in a directory of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.llms.rag_blend import BlendLLM
from tqdm import tqdm

from rag_blend import RagBlendError
from rag_blend_app.embedding import WordLlamaEmbedding

CHUNK_TOKENS = 512
OVERLAP_TOKENS = 20
_FACTS = "collection.json"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What must be the same whenever a collection is used.

    Attributes:
        model: Directory or hub id of the model that answers; chunks are measured in its tokens.
        namespace: Tenant of the KV caches.
        chunk_tokens: Longest chunk.
        on_unsupported: What is done with a model that cannot be blended, see `rag_blend.BlendEngine`.
        exact_first: Whether chunks are kept a second time, see `rag_blend.BlendEngine`.
        pending: How many chunks an ingestion that has not ended is to have cached when it ends.
    """

    model: str
    namespace: str = "default"
    chunk_tokens: int = CHUNK_TOKENS
    on_unsupported: str = "error"
    exact_first: bool = True
    pending: int = 0


@dataclasses.dataclass(frozen=True)
class Changes:
    """Ids of documents that an update has added, replaced and removed."""

    added: list[str]
    replaced: list[str]
    removed: list[str]


class Collection:
    """Chunks and their vectors. The vectors come from `WordLlamaEmbedding`, so nothing is downloaded.

    Args:
        index: The index.
        facts: What it was made with.
    """

    def __init__(self, index: VectorStoreIndex, facts: Facts) -> None:
        self.index = index
        self.facts = facts

    @classmethod
    def new(cls, facts: Facts) -> Collection:
        """An empty one."""
        return cls(VectorStoreIndex([], **_parts(facts)), facts)

    @classmethod
    def load(cls, directory: Path, facts: Facts) -> Collection:
        """The one in a directory; see `facts_of`.

        Raises:
            RagBlendError: It cannot be read.
        """
        try:
            storage = StorageContext.from_defaults(persist_dir=str(directory))
            index: Any = load_index_from_storage(storage, **_parts(facts))
        except (OSError, ValueError, KeyError) as error:
            raise RagBlendError(
                f"the index in {str(directory)!r} is damaged ({error}): remove that directory and ingest again; "
                "caches that are stored are not computed again"
            ) from error
        return cls(index, facts)

    def save(self, directory: Path, pending: int) -> None:
        """Write it to a directory, readable to this user alone. What an interruption leaves there counts as nothing.

        Args:
            directory: The directory.
            pending: See `Facts`; `complete` follows.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory / _FACTS
        with tempfile.TemporaryDirectory(dir=directory) as work:
            self.index.storage_context.persist(work)
            facts.unlink(missing_ok=True)
            for file in Path(work).iterdir():
                file.chmod(0o600)  # it may be copied out of the directory
                os.replace(file, directory / file.name)
        self._write_facts(directory, pending)

    def complete(self, directory: Path) -> None:
        """All chunks of the collection in this directory are cached."""
        self._write_facts(directory, 0)

    def _write_facts(self, directory: Path, pending: int) -> None:
        self.facts = dataclasses.replace(self.facts, pending=pending)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            written = Path(work, _FACTS)
            written.touch(mode=0o600)
            written.write_text(json.dumps(dataclasses.asdict(self.facts)), "utf-8")
            os.replace(written, directory / _FACTS)

    def update(self, documents: Sequence[Document], gone: Iterable[str], progress: bool) -> Changes:
        """Take documents in, replace those that changed, remove those that are gone."""
        hashes = {document.id_: self.index.docstore.get_document_hash(document.id_) for document in documents}
        added = [id_ for id_, known in hashes.items() if known is None]
        replaced = [document.id_ for document in documents if hashes[document.id_] not in (None, document.hash)]
        removed = sorted(gone)
        for id_ in removed:
            self.index.delete_ref_doc(id_, delete_from_docstore=True)
        for document in tqdm(documents, desc="index", unit="doc", disable=not progress):
            self.index.refresh_ref_docs([document])
        return Changes(added, replaced, removed)

    def document_ids(self) -> list[str]:
        """Of all documents."""
        return list(self.index.docstore.get_all_ref_doc_info() or {})

    def chunks(self) -> list[BaseNode]:
        """All of them, in the order of the documents."""
        return self.index.docstore.get_nodes(list(self.index.index_struct.nodes_dict.values()))

    def retrieve(self, question: str, top_k: int) -> list[NodeWithScore]:
        """The chunks that resemble a question most, best first; none where nothing resembles it at all."""
        hits = self.index.as_retriever(similarity_top_k=top_k).retrieve(question)
        return [hit for hit in hits if hit.score is not None and hit.score > 0]


def facts_of(directory: Path) -> Facts | None:
    """What the collection in a directory was made with; None if there is none.

    Raises:
        RagBlendError: It cannot be read.
    """
    path = directory / _FACTS
    if not path.exists():
        return None
    try:
        return Facts(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RagBlendError(f"{path} is damaged ({error}): remove {str(directory)!r} and ingest again") from error


def split(documents: Sequence[Document], facts: Facts) -> list[BaseNode]:
    """The chunks of documents. Reads the model's tokenizer, not its weights."""
    return _splitter(facts).get_nodes_from_documents(documents)


def _parts(facts: Facts) -> dict[str, Any]:
    return {"embed_model": WordLlamaEmbedding(), "transformations": [_splitter(facts)]}


def _splitter(facts: Facts) -> SentenceSplitter:
    llm = BlendLLM(facts.model)
    return SentenceSplitter(
        chunk_size=facts.chunk_tokens,
        chunk_overlap=min(OVERLAP_TOKENS, facts.chunk_tokens // 8),
        tokenizer=lambda text: llm.tokenizer(text),  # read when something is split: who asks splits nothing
    )
