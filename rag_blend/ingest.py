"""Prefill chunks once, behind the head and the priming text they are given, and hand over their caches."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from rag_blend.chunk import GENERIC_HEAD, NO_TOKENS, ChunkKV, ChunkOrigin, Context, digest_ids
from rag_blend.prefiller import ChunkPrefiller, Job, Prefilled, PrefillModel
from rag_blend.primer import Primer
from rag_blend.prompt import bos_ids, chunk_ids
from rag_blend.sample import UNPRIMED
from rag_blend.store import KVStore

logger = logging.getLogger(__name__)

MIN_CHUNK_TOKENS = 16  # shorter chunks cannot be found in a prompt
_BATCH_TOKENS = 2048  # a batch is compute-bound well before this; more would only cost memory
_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What one call of `BlendEngine.ingest` did.

    Attributes:
        chunks: Chunks whose caches were computed and stored.
        tokens: Their tokens.
        bytes: What was written for them, and for a new head.
        skipped: Texts that were not computed: stored already, given twice, too short to be found again, or (with a
            warning) too long for the context window or not finite.
        seconds: Wall time.
    """

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    seconds: float = 0.0


class Ingester:
    """Brings texts into the store, once each.

    Args:
        model: Computes the rows.
        tokenizer: Its tokenizer.
        store: Where the caches go.
        primer: Chooses priming texts.
        lock: Held while the model or the catalog is used, so that queries can come between two batches.
        context_window: Longest sequence the model takes, in tokens.
        learn: Told of each chunk that is stored now: its key, origin and token ids. None: nobody asks prompts here.
    """

    def __init__(
        self,
        model: PrefillModel,
        tokenizer: PreTrainedTokenizerBase,
        store: KVStore,
        primer: Primer,
        lock: threading.RLock,
        context_window: int,
        learn: Callable[[str, ChunkOrigin, np.ndarray], None] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._store = store
        self._primer = primer
        self._lock = lock
        self._context_window = context_window
        self._learn = learn

    def ingest(
        self, texts: Sequence[str], head: np.ndarray | None, documents: Sequence[str], progress: bool
    ) -> IngestReport:
        """See `BlendEngine.ingest`; `documents` has one id per text, "" where it has none."""
        started = time.perf_counter()
        chunks = chunk_ids(self._tokenizer, texts)
        with self._lock:
            self._primer.learn(chunks, documents)
            jobs = self._plan(chunks, documents, head)
        copies = self._copies_of(jobs, head)
        linked = [*zip(jobs, documents, strict=True), *zip(copies, documents, strict=True)]
        self._link(linked)
        heads = [] if head is None else [self._head_job(head)]
        both = [job for pair in zip(jobs, copies, strict=True) for job in pair]  # side by side, see `_batches`
        missing = self._unknown([*heads, *both])
        others = {job.key for job in (*heads, *copies) if job is not None}
        num_bytes = self._compute(missing, others, progress)
        self._link(linked)  # again, for what was written while somebody forgot the document
        computed = [job for job in missing if job.key in num_bytes and job.key not in others]
        return IngestReport(
            chunks=len(computed),
            tokens=sum(len(job.token_ids) for job in computed),
            bytes=sum(num_bytes.values()),
            skipped=len(texts) - len(computed),
            seconds=time.perf_counter() - started,
        )

    def _plan(
        self, chunks: Sequence[np.ndarray], documents: Sequence[str], head: np.ndarray | None
    ) -> list[_Job | None]:
        """What to compute for each text; None for those that are not worth it or do not fit."""
        before = bos_ids(self._tokenizer) if head is None else head
        head_digest = GENERIC_HEAD if head is None else digest_ids(head)
        jobs: list[_Job | None] = []
        for chunk, priming in zip(chunks, self._primer.primings_of(chunks, documents), strict=True):
            contexts = priming.contexts(before)
            if not self._fits(contexts[0].token_ids, chunk):
                jobs.append(None)
                continue
            origin = self._store.origin(head_digest, priming.digest)
            jobs.append(_Job(chunk, contexts, self._store.key_of(origin, chunk), origin))
        return jobs

    def _copies_of(self, jobs: Sequence[_Job | None], head: np.ndarray | None) -> list[_Job | None]:
        """What is kept for where a chunk stands first, for each job."""
        if head is None or not self._primer.keeps_copies:  # behind a head that nobody knows, nothing is exact
            return [None] * len(jobs)
        origin, contexts = self._store.origin(digest_ids(head), UNPRIMED.digest), UNPRIMED.contexts(head)
        return [
            None if job is None else _Job(job.token_ids, contexts, self._store.key_of(origin, job.token_ids), origin)
            for job in jobs
        ]

    def _fits(self, context: np.ndarray, chunk: np.ndarray) -> bool:
        if len(chunk) < MIN_CHUNK_TOKENS:
            return False
        total = len(context) + len(chunk)
        if total > self._context_window:
            logger.warning(
                "a chunk of %d tokens behind %d tokens of head and priming text does not fit the context window of "
                "%d; it is not cached. Use smaller chunks or a smaller prime_tokens.",
                len(chunk), len(context), self._context_window,
            )  # fmt: skip
            return False
        return True

    def _head_job(self, head: np.ndarray) -> _Job:
        """The head's own cache: behind nothing, so exact for every prompt that begins with it."""
        digest = digest_ids(head)
        if read_head(self._store, digest) is None:
            name = _head_record(self._store, digest)
            self._store.backend.delete_record(name)  # a damaged one would stay for ever: the first writer wins
            self._store.backend.put_record(name, json.dumps(head.tolist()).encode())
        origin = self._store.origin(NO_TOKENS, NO_TOKENS)
        return _Job(head, (Context(_NOTHING, 1.0),), self._store.key_of(origin, head), origin)

    def _link(self, jobs: Iterable[tuple[_Job | None, str]]) -> None:
        # Before anything is written: a document that can be found must also be forgettable.
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for job, document in jobs:
            if job is not None and document:
                keys[document].append(job.key)
        for document, needed in keys.items():
            self._store.link(document, needed)

    def _unknown(self, jobs: Sequence[_Job | None]) -> list[_Job]:
        """The jobs still to be done, each once; what is stored already is told here."""
        unknown = []
        for job in {job.key: job for job in jobs if job is not None}.values():
            if not self._store.has(job.key):
                unknown.append(job)
                continue
            with self._lock:
                self._tell(job)
        return unknown

    def _compute(self, jobs: Sequence[_Job], others: AbstractSet[str], progress: bool) -> dict[str, int]:
        """Prefill and store; returns the bytes that each stored key takes. Progress is of chunks, `others` are none."""
        prefiller = ChunkPrefiller(self._model, jobs)
        num_bytes: dict[str, int] = {}
        lengths = {job.key: len(job.token_ids) for job in jobs}
        shown = {key: length for key, length in lengths.items() if key not in others} or lengths
        with (
            ThreadPoolExecutor(1, thread_name_prefix="rag-blend-write") as writer,
            tqdm(total=sum(shown.values()), desc="KV caches", unit="tok", disable=not progress or not jobs) as bar,
        ):

            def finish(writing: Future[None], written: _Written) -> None:
                try:
                    writing.result()
                finally:  # what was written before a failure stays
                    num_bytes.update(self._accept(written))
                    bar.update(sum(shown.get(job.key, 0) for job, _ in written))
                    bar.set_postfix_str(f"{sum(num_bytes.values()) / 1e6:.0f} MB")

            under_way: tuple[Future[None], _Written] | None = None
            for batch in _batches(jobs):
                with self._lock:
                    prefilled = prefiller.prefill(batch)
                if under_way is not None:
                    finish(*under_way)
                written: _Written = []
                under_way = writer.submit(self._write, batch, prefilled, written), written  # meanwhile the next one
            if under_way is not None:
                finish(*under_way)
        return num_bytes

    def _write(self, batch: Sequence[_Job], prefilled: Sequence[Prefilled], written: _Written) -> None:
        for job, (layers, staleness) in zip(batch, prefilled, strict=True):
            try:
                done = self._store.put(ChunkKV(job.origin, job.token_ids, layers, staleness))
            except ValueError as error:
                logger.warning("a chunk is not cached: %s", error)
                written.append((job, None))
            except OSError as error:
                error.add_note("What was stored before stays; ingest again when the storage has room.")
                raise
            else:
                written.append((job, done.num_bytes))

    def _accept(self, written: _Written) -> dict[str, int]:
        """Make what was written known; returns the bytes that each key takes."""
        num_bytes = {}
        with self._lock:
            self._primer.reload()  # somebody may have forgotten the document that the sample came from
            for job, size in written:
                if size is None:
                    continue
                if job.origin.prime != NO_TOKENS and not self._primer.accepts(job.origin.prime):
                    self._store.backend.delete(job.key)
                    continue
                self._tell(job)
                num_bytes[job.key] = size
        return num_bytes

    def _tell(self, job: _Job) -> None:
        if self._learn is not None:
            self._learn(job.key, job.origin, job.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Job):
    key: str
    origin: ChunkOrigin


_Written = list[tuple[_Job, int | None]]  # and the bytes of each, None where it could not be stored


def require_documents(texts: Sequence[str], doc_ids: Sequence[str] | None) -> None:
    """Check what somebody wants to be ingested.

    Raises:
        ValueError: `doc_ids` and `texts` differ in length.
        TypeError: One of them is not a sequence of strings.
    """
    _require_strings("texts", texts)
    _require_strings("doc_ids", doc_ids or ())
    if doc_ids is not None and len(doc_ids) != len(texts):
        raise ValueError(f"{len(texts)} texts, but {len(doc_ids)} doc_ids")


def _require_strings(name: str, values: Iterable[str]) -> None:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{name} must be a list of strings")


def read_head(store: KVStore, digest: str) -> np.ndarray | None:
    """Token ids of the head with this digest, int32; None when they are unknown or damaged."""
    try:
        data = store.backend.get_record(_head_record(store, digest))
        ids = np.asarray(json.loads(data or b"null"), dtype=np.int32)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return ids if ids.ndim == 1 and digest_ids(ids) == digest else None


def _head_record(store: KVStore, digest: str) -> str:
    return store.record_name("head", digest)


def _batches(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Jobs of similar length together, longest first; a chunk's unprimed copy goes with it: there it costs nothing."""
    batch: list[_Job] = []
    num_texts = 0
    for job in sorted(jobs, key=lambda job: -len(job.token_ids)):
        if batch and job.origin.priming == "none" and np.array_equal(job.token_ids, batch[-1].token_ids):
            batch.append(job)
            continue
        if batch and (num_texts + 1) * len(batch[0].token_ids) > _BATCH_TOKENS:
            yield batch
            batch, num_texts = [], 0
        batch.append(job)
        num_texts += 1
    if batch:
        yield batch
