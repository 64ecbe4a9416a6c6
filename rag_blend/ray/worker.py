"""What one worker does: it has the model and the store, and brings chunks from the one into the other.

It is less than an engine. An engine lists a store when it opens it and remembers every chunk, so that prompts find
them; here nobody asks, and a store of millions would be listed by every worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_blend.codecs import Codec
from rag_blend.errors import UnsupportedModelError
from rag_blend.fingerprint import fingerprint_of, stored_dtype
from rag_blend.info import context_window_of
from rag_blend.ingest import Ingester, IngestReport
from rag_blend.loading import load
from rag_blend.models import ModelAdapter, adapter_for, bare_model
from rag_blend.primer import Primer
from rag_blend.prompt import chunk_ids, head_ids
from rag_blend.ray.source import Chunk
from rag_blend.selftest import check_model
from rag_blend.storage import open_storage
from rag_blend.store import KVStore
from rag_blend.transformers_prefill import TransformersPrefill


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker has to know. The defaults are those of `BlendEngine`.

    Attributes:
        model: Local directory, the same on all nodes, or hub id.
        storage: Directory or URL that all nodes reach.
        head: See `BlendEngine.ingest`.
        namespace: See `BlendEngine`, like the next six.
        prime: The same.
        prime_tokens: The same.
        prime_texts: The same.
        exact_first: The same.
        kv_dtype: The same.
        codec: The same.
        device: See `BlendEngine.from_pretrained`, like the next two.
        dtype: The same.
        model_kwargs: The same.
    """

    model: str | os.PathLike[str]
    storage: str
    head: str | Sequence[int] | None = None
    namespace: str = "default"
    prime: str = "sample"
    prime_tokens: int = 512
    prime_texts: int = 1
    exact_first: bool = True
    kv_dtype: torch.dtype | None = None
    codec: str | Codec = "raw"
    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    model_kwargs: dict[str, Any] | None = None


class IngestWorker:
    """A model and a store, in a process of their own.

    Args:
        settings: The same for all workers.

    Raises:
        UnsupportedModelError: The model cannot be blended.
        ValueError: A setting is out of its range.
        OSError: There is no such model, or the storage does not answer.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        model, self._tokenizer = load(settings.model, settings.device, settings.dtype, settings.model_kwargs)
        model = bare_model(model).eval()
        adapter = _checked_adapter(model)
        kv_dtype = stored_dtype(model.dtype, settings.kv_dtype)
        fingerprint = fingerprint_of(model, self._tokenizer, kv_dtype).digest
        backend = open_storage(settings.storage)
        store = KVStore(backend, fingerprint, settings.namespace, kv_dtype, settings.codec)
        priming = (settings.prime, settings.prime_tokens, settings.prime_texts, settings.exact_first)
        self._primer = Primer(*priming, self._tokenizer, store)
        self._ingester = Ingester(
            TransformersPrefill(adapter),
            self._tokenizer,
            store,
            self._primer,
            threading.RLock(),
            context_window_of(model.config, self._tokenizer),
        )
        self._head = head_ids(self._tokenizer, settings.head, model.get_input_embeddings().num_embeddings)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Store what all chunks have in common: the priming texts, drawn from these chunks, and the head.

        Done by one worker before the others start. Each of them would draw from the chunks that it happens to get,
        and until somebody has drawn, prime with a bundled text instead.
        """
        texts, documents = _columns(chunks)
        self._primer.learn(chunk_ids(self._tokenizer, texts), documents)
        self.ingest([])

    def ingest(self, chunks: Sequence[Chunk]) -> IngestReport:
        """Prefill and store those that are not stored yet.

        Raises:
            OSError: The storage refused; what was written before stays.
        """
        texts, documents = _columns(chunks)
        return self._ingester.ingest(texts, self._head, documents, progress=False)


def _checked_adapter(model: PreTrainedModel) -> ModelAdapter:
    try:
        adapter = adapter_for(model)
        check_model(adapter)
    except UnsupportedModelError as error:  # whose advice is about serving
        raise UnsupportedModelError(error.reason, servable=False) from error
    return adapter


def _columns(chunks: Sequence[Chunk]) -> tuple[list[str], list[str]]:
    return [chunk.text for chunk in chunks], [chunk.document for chunk in chunks]
