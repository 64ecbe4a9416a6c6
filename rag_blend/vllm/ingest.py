"""Chunks ingested by vLLM itself: the same store, the same keys, the same priming, with no second engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from rag_blend.codecs import Codec, codec_of
from rag_blend.ingest import Ingester, IngestReport, require_documents
from rag_blend.primer import Primer
from rag_blend.prompt import head_ids
from rag_blend.storage import open_storage
from rag_blend.store import KVStore
from rag_blend.vllm.checkpoint import geometry_of, read_checkpoint
from rag_blend.vllm.options import Options
from rag_blend.vllm.prefill import VllmPrefill
from rag_blend.vllm.support import require_connector, require_worker

if TYPE_CHECKING:
    from vllm import LLM


def ingest(
    llm: LLM,
    texts: Sequence[str],
    head: str | Sequence[int] | None = None,
    doc_ids: Sequence[str] | None = None,
    *,
    namespace: str = "default",
    codec: str | Codec = "raw",
    progress: bool = True,
) -> IngestReport:
    """Prefill texts with vLLM's model and keep their caches, as `BlendEngine.ingest` does. Run it again to go on.

    Storage, priming and dtypes are those that the server's connector was given. vLLM's prefix cache is emptied, and
    until this returns, its cache holds the chunks: give it no requests meanwhile.

    Args:
        llm: Made with the options of a server, see docs/vllm.md.
        texts: See `BlendEngine.ingest`, like the next two.
        head: The same.
        doc_ids: The same.
        namespace: Tenant; one of the connector's.
        codec: See `BlendEngine`.
        progress: Show a progress bar.

    Raises:
        ValueError: An argument or an option of vLLM must be another one.
        TypeError: `texts` or `doc_ids` is not a sequence of strings.
        RuntimeError: vLLM is busy, was given requests meanwhile, or a worker did not deliver all that it computed.
        OSError: The storage refused; what was written before stays.
    """
    require_documents(texts, doc_ids)
    config = llm.llm_engine.vllm_config
    require_worker(config)
    require_connector(config)
    options, codec = Options.of(config.kv_transfer_config.kv_connector_extra_config), codec_of(codec)
    if namespace not in options.namespaces:
        raise ValueError(f"namespace {namespace!r} is not among the connector's namespaces")
    model = config.model_config
    kv_dtype = options.stored_dtype(model.dtype)
    with _cache_of(llm), closing(open_storage(options.storage)) as backend:
        fingerprint, tokenizer = read_checkpoint(model.model, model.dtype, kv_dtype, model.revision)
        geometry = geometry_of(model.model, model.dtype, model.revision)
        ids = head_ids(tokenizer, head, geometry.config.vocab_size)
        store = KVStore(backend, fingerprint, namespace, kv_dtype, codec)
        primer = Primer(*options.priming, tokenizer, store)
        rows = VllmPrefill(llm, geometry)
        ingester = Ingester(rows, tokenizer, store, primer, threading.RLock(), model.max_model_len)
        return ingester.ingest(texts, ids, doc_ids or [""] * len(texts), progress)


@contextmanager
def _cache_of(llm: LLM) -> Iterator[None]:
    """Have vLLM's cache to oneself; behind it, nothing that vLLM remembers is in it any more."""
    if llm.llm_engine.has_unfinished_requests() or not llm.reset_prefix_cache():
        raise RuntimeError("vLLM has requests under way: ingest when they are answered, their cache is needed")
    llm.collective_rpc("forget_rows")  # vLLM may have slept since an ingestion before
    try:
        yield
    finally:
        emptied = llm.reset_prefix_cache()
    if not emptied:
        raise RuntimeError("vLLM was given requests during an ingestion: make a new one, its cache is spoilt")
