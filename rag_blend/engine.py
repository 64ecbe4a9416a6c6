"""The engine: wires model, store, matching, blending and decoding together. Knows no framework."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from rag_blend.batching import RequestQueue
from rag_blend.cache import BlendCache
from rag_blend.calibration import (
    DEFAULT_TARGET_AGREEMENT,
    DEFAULT_TARGET_KL,
    Verdict,
    load_verdict,
    priming_of,
    save_verdict,
)
from rag_blend.catalog import Findings
from rag_blend.codecs import Codec, codec_of
from rag_blend.continuation import Continuation
from rag_blend.control import Controller, ReuseWhen
from rag_blend.decode import can_decode_together
from rag_blend.errors import GenerationCancelledError, PromptTooLongError, UnsupportedModelError
from rag_blend.fingerprint import fingerprint_of, stored_dtype
from rag_blend.generation import (
    Generation,
    GenerationStats,
    PieceStreamer,
    Prefill,
    TextStream,
    stop_strings,
    wanted_tokens,
)
from rag_blend.info import context_window_of
from rag_blend.ingest import Ingester, IngestReport, require_documents
from rag_blend.later import IdleClock, IdleIngester, PendingText
from rag_blend.listing import empty_catalog, usable_chunks
from rag_blend.loading import load
from rag_blend.metrics import NO_FAULTS, Metrics, MetricsRecorder, drift_figures, tiers_of
from rag_blend.models import ModelAdapter, adapter_for, bare_model, describe, lock_of
from rag_blend.plan import BlendPlan
from rag_blend.policy import DEFAULT_SELECTOR, PolicyChooser, PolicyInfo, Ratio
from rag_blend.prefixes import PrefixCache
from rag_blend.primer import Primer
from rag_blend.prompt import chunk_ids, ids_in_front, prompt_ids
from rag_blend.runner import BlendPolicy, PromptRunner
from rag_blend.selectors import TokenSelector
from rag_blend.selftest import check_model
from rag_blend.serving import Request, Server
from rag_blend.shadow import MAX_ANSWER_TOKENS, DriftReport, ShadowChecker, ShadowQuery
from rag_blend.space import Space
from rag_blend.storage import StorageBackend, open_storage
from rag_blend.store import KVStore
from rag_blend.teacher import forced_logits
from rag_blend.trace import TraceRecorder
from rag_blend.transformers_prefill import TransformersPrefill
from rag_blend.work import cost_of, timed_prefills

logger = logging.getLogger(__name__)
T = TypeVar("T")

Place = str | os.PathLike[str] | StorageBackend
Storage = Place | Sequence[Place] | None
OnUnsupported = Literal["error", "full", "calibrated", "measured"]


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What `BlendEngine.forget` did.

    Attributes:
        entries: Stored chunks that were deleted.
        prime_renewed: The text that chunks are primed with came from one of the documents, so every chunk primed
            with it is gone too: ingest the remaining documents again.
    """

    entries: int = 0
    prime_renewed: bool = False


class BlendEngine:
    """A Hugging Face model that prefills only what it has not prefilled before.

    All methods may be called from several threads; the model serves one of them at a time.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        storage: Where caches live: a directory, a URL, a `StorageBackend`, a list of these for several tiers, nearest
            first (``["memory://?quota=2GB", "kv/", "redis://host/0"]``), or None for this process's memory.
        selector: Which reusable tokens are recomputed, unless a calibration chose another selector: a name
            (``"heads"``, ``"spread"``, ``"hkvd"``, ``"probe"``, ``"anchor"``, ``"random"``, ``"all"``, ``"none"``) or a
            `TokenSelector`, which never gives way.
        recompute_ratio: Share of the reusable tokens to recompute. ``"auto"``: selector and ratio are those that
            ``rag-blend calibrate`` has found for this model, namespace and priming, or full prefill if it found
            none; without a calibration, the selector's own default. None: the selector's own default. 1.0: all of
            them, whatever the selector, and nothing is taken from the store.
        prime: What stands between head and chunk while a chunk is ingested. ``"sample"``: text drawn once from the
            collection. ``"preceding"``: what stands in front of the chunk in its document (a sample where there is
            nothing), if chunks are retrieved together with their neighbours; costs its prefill for every chunk.
            ``"none"``, or a text.
        prime_tokens: Length of a sampled priming text; best about as much text as will stand in front of a chunk.
        prime_texts: How many sampled texts a chunk is primed with, one at a time: the mean of its caches is stored,
            with the one behind the head alone among them. Each text costs a prefill of the chunk at ingestion.
        exact_first: Keep each primed chunk also as it is behind the head alone: what stands first in a prompt, the best
            hit with most retrievers, is then exact. False halves the storage.
        namespace: Tenant. Entries of different namespaces never meet.
        kv_dtype: Dtype of stored keys and values. None: the model's own if it has 16 bits, else float16.
        codec: How new entries are written down: ``"raw"``, ``"zstd"`` (lossless), ``"int8"``, ``"int4"``, or a `Codec`.
            Entries of every codec are read, and what is stored already stays as it is.
        any_head: Reuse chunks also behind another head than the one they were cached behind.
        on_unsupported: What to do with a model that cannot be blended: ``"error"``, or ``"full"`` to serve it by
            plain full prefill, of which only what earlier prompts begin with is reused, exactly. ``"calibrated"``: a
            model whose attention slides over a window is blended where ``rag-blend calibrate`` has passed for it in
            this store, with the same namespace and priming; others, and until then, as ``"full"``. A selector or ratio
            that somebody names is followed, though nothing was measured with it. ``"measured"``: it is blended without
            a calibration, as a calibration must; others are errors.
        shadow: Share of the answered prompts that are compared with full prefill in the background, when the model
            is free; see `drift`. 0: none.
        reuse_when: ``"faster"``: stored chunks are left alone where computing them is expected to take no longer, as
            for short prompts or a slow store. ``"possible"``: they are always used.
        max_batch: How many requests that wait for the model are decoded together at most; 1: each alone.
        prefix_cache_bytes: Memory in which answered prompts stay, with their answers: a later prompt that begins the
            same (asked again, or the next turn of a chat) goes on from there. 0: none stays.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        ValueError: An argument is out of its range.
        ModuleNotFoundError: A library is missing that the codec or the storage needs; the text says what to install.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        storage: Storage = "kv/",
        selector: str | TokenSelector = DEFAULT_SELECTOR,
        recompute_ratio: Ratio = "auto",
        prime: str = "sample",
        prime_tokens: int = 512,
        prime_texts: int = 1,
        exact_first: bool = True,
        namespace: str = "default",
        kv_dtype: torch.dtype | None = None,
        codec: str | Codec = "raw",
        any_head: bool = False,
        on_unsupported: OnUnsupported = "error",
        shadow: float = 0.0,
        prefix_cache_bytes: int = 256 * 2**20,
        max_batch: int = 16,
        reuse_when: ReuseWhen = "faster",
    ) -> None:
        codec = codec_of(codec)  # a wrong name shall not cost the time that digesting the weights takes
        self._policies = PolicyChooser(selector, recompute_ratio)
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if on_unsupported not in (choices := get_args(OnUnsupported)):
            raise ValueError(f"on_unsupported must be one of {', '.join(choices)}, not {on_unsupported!r}")
        model = bare_model(model)
        self._closed = False
        self._recorder = MetricsRecorder()
        self._listeners: dict[int, list[Generation]] = {}
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._model = model.eval()
        self.tokenizer = tokenizer
        self._lock = lock_of(model)
        self._shadow = ShadowChecker(shadow, self._lock, self._logits_along, self._target)
        self._on_unsupported = on_unsupported
        with self._lock:  # the model may be in use by another engine
            self._able = self._adapter = self._adapt()
        self._server = Server(model, tokenizer, self._run, self._on_answer)
        answer = (self._server.answer, self._server.answer_together)
        self._queue = RequestQueue(self._lock, *answer, self._go_together, max_batch)
        self.context_window = context_window_of(model.config, tokenizer)
        kv_dtype = stored_dtype(model.dtype, kv_dtype)
        self._backend = open_storage(storage)
        with self._lock:  # another engine's self-test may be changing the configuration for the time being
            fingerprint = fingerprint_of(model, tokenizer, kv_dtype).digest
            if self._adapter is not None:
                self._control = _controller_for(self._adapter, reuse_when, self._backend.parallel_reads)
        self._store = KVStore(self._backend, fingerprint, namespace, kv_dtype, codec)
        self._primer = Primer(prime, prime_tokens, prime_texts, exact_first, tokenizer, self._store)
        self._priming = priming_of(prime, prime_tokens, prime_texts, exact_first)
        self._catalog = empty_catalog(self._store, self._primer, any_head)
        self._clock = IdleClock()
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="rag-blend-prefetch")
        self._later = IdleIngester(self._ingest_now, self._clock.idle_s)
        self.refresh()
        if self.can_blend and self.policy.source == "default":
            logger.warning(
                "no calibration for %s in this store: %s serves; see `rag-blend calibrate`",
                self.model_name,
                self.policy,
            )

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | os.PathLike[str],
        storage: Storage = "kv/",
        selector: str | TokenSelector = DEFAULT_SELECTOR,
        recompute_ratio: Ratio = "auto",
        prime: str = "sample",
        namespace: str = "default",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        model_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> BlendEngine:
        """Load a model and its tokenizer, and make an engine of them.

        Args:
            path_or_hub_id: Local directory or hub id.
            storage: See `BlendEngine`, like the next four.
            selector: See `BlendEngine`.
            recompute_ratio: See `BlendEngine`.
            prime: See `BlendEngine`.
            namespace: See `BlendEngine`.
            device: None: CUDA if there is one, else the CPU.
            dtype: None: the checkpoint's own; on a CPU float32 (most compute 16-bit formats far slower), unless the
                checkpoint is in bfloat16 and the CPU has matrix instructions for it (AMX).
            model_kwargs: More arguments of ``AutoModelForCausalLM.from_pretrained``.
            options: More arguments of `BlendEngine`.

        Raises:
            UnsupportedModelError: The model cannot be blended correctly, or is no decoder of text at all.
            OSError: There is no such model.
        """
        model, tokenizer = load(path_or_hub_id, device, dtype, model_kwargs)
        return cls(model, tokenizer, storage, selector, recompute_ratio, prime, namespace=namespace, **options)

    @property
    def model_name(self) -> str:
        """Name or path the model was loaded from."""
        return str(self._model.config.name_or_path or type(self._model).__name__)

    @property
    def can_blend(self) -> bool:
        """False when the model is served by plain full prefill, see `mode`."""
        return self._adapter is not None

    @property
    def mode(self) -> Literal["blend", "prefix", "full"]:
        """The most that can be reused: chunks anywhere; what earlier prompts begin with; nothing."""
        if self._adapter is not None:
            return "blend"
        return "prefix" if self._continuation.works else "full"

    @property
    def policy(self) -> PolicyInfo:
        """How prompts are treated unless a call says otherwise, and who decided so."""
        info = self._policies.info
        return info if self.can_blend else replace(info, full_prefill=True)

    @property
    def fingerprint(self) -> str:
        """Digest of what decides whether stored caches are this model's: weights, tokenizer, dtypes."""
        return self._store.fingerprint

    @property
    def num_chunks(self) -> int:
        """Stored chunks that prompts can use, heads among them; copies that `exact_first` keeps do not count."""
        return len(self._catalog)

    @property
    def num_copies(self) -> int:
        """Stored copies of chunks that `exact_first` keeps."""
        return self._catalog.num_copies

    def counts(self) -> dict[str, int]:
        """Trouble met with stored entries so far: ``missing``, ``corrupt``, ``foreign``, ``unavailable``."""
        return dict(self._store.counts)

    def drift(self) -> DriftReport:
        """How far from full prefill the answers were that `shadow` picked."""
        return self._shadow.report()

    def metrics(self, storage: bool = True) -> Metrics:
        """What happened since this engine was made, and what is stored now, as a dict that JSON takes.

        Args:
            storage: Count what is stored, too. That means listing it, in a bucket with a request per thousand entries.
        """
        return {
            **self._recorder.answers(),
            "ingested": self._recorder.ingestions(),
            "faults": {**NO_FAULTS, **self.counts()},
            "drift": drift_figures(self.drift()),
            "waiting": {"requests": len(self._queue), "texts": len(self._later)},
            "chunks": self.num_chunks,
            "storage": tiers_of(self._backend) if storage else {},
        }

    @contextmanager
    def listening(self) -> Iterator[list[Generation]]:
        """Collect the answers that are given meanwhile, to whoever asks: a framework's query engine, say.

        `generate`'s and `stream`'s, in the order in which they end; their traces show the frameworks' prompts.
        """
        answers: list[Generation] = []
        self._listeners[id(answers)] = answers
        try:
            yield answers
        finally:
            del self._listeners[id(answers)]

    def adopt(self, verdict: Verdict) -> None:
        """Record a calibration's verdict for this model, namespace and priming, and follow it.

        Raises:
            OSError: The storage refused.
            RuntimeError: The engine is closed.
        """
        self._require_open()
        with self._lock:
            save_verdict(self._store, self._priming, verdict)
            self._follow(verdict)

    def ingest(
        self,
        texts: Sequence[str],
        head: str | Sequence[int] | None = None,
        doc_ids: Sequence[str] | None = None,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill texts and keep their caches. Running it again costs next to nothing.

        Args:
            texts: The chunks, as they will stand in prompts. Outer whitespace does not matter.
            head: What will stand in front of the first chunk of a prompt (chat template, instructions): text, which
                gets special tokens by the rule of `prefill`, or token ids. Prompts that begin otherwise do not reuse
                these chunks; prompts that begin so reuse the head itself exactly, from 16 tokens on. None: any
                prompt may use them.
            doc_ids: One id per text, for `forget`.
            progress: Show a progress bar.

        Raises:
            ValueError: `doc_ids` and `texts` differ in length.
            TypeError: One of them is not a sequence of strings.
            OSError: The storage refused; what was written before stays.
            RuntimeError: The engine is closed.
        """
        self._require_open()
        require_documents(texts, doc_ids)
        adapter = self._adapter
        if adapter is None:
            logger.warning("%s is served by full prefill: nothing is ingested", self.model_name)
            return IngestReport(skipped=len(texts))
        head_ids = None if head is None else self._known_ids(ids_in_front(self.tokenizer, head))
        ingester = Ingester(
            TransformersPrefill(adapter),
            self.tokenizer,
            self._store,
            self._primer,
            self._lock,
            self.context_window,
            self._catalog.add,
        )
        report = ingester.ingest(texts, head_ids, doc_ids or [""] * len(texts), progress)
        self._recorder.ingested(report)
        return report

    def ingest_later(
        self,
        texts: Sequence[str],
        head: str | Sequence[int] | None = None,
        doc_ids: Sequence[str] | None = None,
    ) -> int:
        """Like `ingest`, in the background, as soon as the model has been idle for a moment. Returns at once.

        For texts that are met for the first time when they are retrieved: the question comes first. A failure is
        logged; what still waits when the engine is closed is dropped.

        Returns:
            How many of the texts wait now; the others found the queue full.

        Raises:
            ValueError: See `ingest`.
            TypeError: See `ingest`.
            RuntimeError: The engine is closed.
        """
        self._require_open()
        require_documents(texts, doc_ids)
        self._clock.touch()
        ids = None if head is None else tuple(self._known_ids(ids_in_front(self.tokenizer, head)).tolist())
        documents = doc_ids or [""] * len(texts)
        return self._later.offer([PendingText(text, ids, doc) for text, doc in zip(texts, documents, strict=True)])

    def wait_for_ingestion(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until nothing of `ingest_later` is left to do; whether that is so."""
        return self._later.flush(timeout)

    def prefetch(self, texts: Sequence[str]) -> None:
        """Have the caches of texts that will soon stand in a prompt brought nearer, in the background.

        Useful where caches lie in a far tier; otherwise nothing happens. Returns at once.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._require_open()
        require_documents(texts, None)
        self._clock.touch()
        self._fetching.submit(self._prefetch_now, list(texts))

    def prefill(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool | None = None,
        selector: str | TokenSelector | None = None,
        recompute_ratio: Ratio = None,
        reuse: bool = True,
    ) -> Prefill:
        """Prefill a prompt, reusing what is stored.

        Args:
            prompt: Text or token ids. Text gets the tokenizer's special tokens unless it already begins with BOS;
                pass `add_special_tokens=False` for the output of a chat template.
            add_special_tokens: Overrides that rule.
            selector: Another selector than the engine's, for this prompt; the engine's ratio stays, but not a
                calibrated one.
            recompute_ratio: Another ratio than the engine's or the calibrated one, for this prompt.
            reuse: False: plain full prefill, whatever is stored.

        Raises:
            PromptTooLongError: The prompt does not fit the context window.
        """
        record = TraceRecorder()
        policy = self._policies.resolve(selector, recompute_ratio, reuse)
        ids = self._checked_ids(prompt, add_special_tokens)
        record.turn("queue")

        def call(cache: BlendCache | None) -> tuple[tuple[torch.Tensor, Cache, float], Sequence[int]]:
            logits, whole = self._server.forward(ids, cache)
            logits[0].item()  # an accelerator has finished then, too
            return (logits, whole, time.perf_counter()), ids.tolist()

        with self._clock, self._lock:
            (logits, cache, finished), stats = self._run(ids, policy, call, record)
        stats = replace(stats, ttft_s=finished - record.started)
        return Prefill(logits, cache, stats, record.trace(ids, self.tokenizer, finished))

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool | None = None,
        cancel: threading.Event | None = None,
        selector: str | TokenSelector | None = None,
        recompute_ratio: Ratio = None,
        reuse: bool = True,
        **generation_kwargs: Any,
    ) -> Generation:
        """Answer a prompt with ``model.generate``, prefilled by `prefill`'s rules.

        Args:
            prompt: See `prefill`.
            max_new_tokens: Upper limit; less when the context window ends before. None: what `generation_config`, the
                given one or the model's, says, else 256.
            stop: The answer ends before the first of these strings.
            add_special_tokens: See `prefill`.
            cancel: Set it to stop; the call then raises.
            selector: See `prefill`.
            recompute_ratio: See `prefill`.
            reuse: See `prefill`.
            generation_kwargs: Anything else that ``model.generate`` takes, e.g. ``do_sample``, ``temperature``,
                ``generation_config``.

        Raises:
            PromptTooLongError: The prompt does not fit the context window.
            GenerationCancelledError: `cancel` was set.
        """
        request = self._request(
            prompt,
            max_new_tokens,
            stop,
            add_special_tokens,
            cancel,
            selector,
            recompute_ratio,
            reuse,
            generation_kwargs,
        )
        with self._clock:
            return self._queue.submit(request)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool | None = None,
        cancel: threading.Event | None = None,
        selector: str | TokenSelector | None = None,
        recompute_ratio: Ratio = None,
        reuse: bool = True,
        **generation_kwargs: Any,
    ) -> list[Generation]:
        """Answer prompts together: each is prefilled by `prefill`'s rules, and up to `max_batch` are decoded at once.

        What is chosen greedily is chosen as by `generate`, up to rounding. Calls of `generate` and `stream` from
        several threads share batches in the same way. Prompts whose arguments do more than steer the choice of a token
        (beams, own processors), or whose RoPE depends on their length, are answered one after the other.

        Args:
            prompts: See `prefill`.
            max_new_tokens: See `generate`, like the rest.
            stop: The same.
            add_special_tokens: The same.
            cancel: Ends all of them.
            selector: The same.
            recompute_ratio: The same.
            reuse: The same.
            generation_kwargs: The same.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            PromptTooLongError: A prompt does not fit the context window; none has been answered then.
            GenerationCancelledError: `cancel` was set.
        """
        cancel = cancel or threading.Event()
        requests = [
            self._request(
                prompt, max_new_tokens, stop, add_special_tokens, cancel, selector, recompute_ratio, reuse,
                generation_kwargs,
            )
            for prompt in prompts
        ]  # fmt: skip
        with self._clock:
            return self._queue.submit_all(requests)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool | None = None,
        cancel: threading.Event | None = None,
        selector: str | TokenSelector | None = None,
        recompute_ratio: Ratio = None,
        reuse: bool = True,
        **generation_kwargs: Any,
    ) -> TextStream:
        """Like `generate`, piece by piece. Closing or dropping the stream stops the computation.

        Raises:
            PromptTooLongError: The prompt does not fit the context window.
        """
        request = self._request(
            prompt,
            max_new_tokens,
            stop,
            add_special_tokens,
            cancel,
            selector,
            recompute_ratio,
            reuse,
            generation_kwargs,
        )

        def run(streamer: PieceStreamer) -> Generation:
            request.streamer = streamer
            with self._clock:
                return self._queue.submit(request)

        return TextStream(run, self.tokenizer, request.stop, request.cancel)

    def forget(self, doc_ids: Iterable[str]) -> ForgetReport:
        """Delete what is stored for these documents, except chunks that other named documents contain as well.

        Priming samples drawn from one of them go too, whichever engine of this namespace has drawn them, with every
        chunk primed with them.

        Raises:
            OSError: The storage refused; call again to finish.
        """
        self._require_open()
        documents = set(doc_ids)
        self._later.drop(documents)
        with self._lock:
            self._prefixes.clear()  # any of them may have the text in it
            samples = self._primer.drawn_from(documents)
            keys = self._store.forget(documents, samples.primes)
            self._catalog.remove(keys)
            self._primer.drop(samples)  # last: until then, calling again would find what is primed with them
        if samples.records:
            logger.warning("a text that chunks were primed with is forgotten; ingest the rest again")
        return ForgetReport(len(keys), bool(samples.records))

    def refresh(self) -> None:
        """Take over what other processes have stored since this engine was made, a calibration included.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._require_open()
        with self._lock:
            self._prefixes.clear()  # another process may have forgotten something
            self._follow(load_verdict(self._store, self._priming))
            self._primer.reload()
            self._catalog.clear()  # not replaced: an ingestion that waits for the lock goes on with it
            self._catalog.add_all(usable_chunks(self._store, self._primer))

    def close(self) -> None:
        """Release handles and memory; only a new engine can be used afterwards. The model stays the caller's."""
        self._fetching.shutdown(cancel_futures=True)
        self._later.close()
        self._closed = True
        self._shadow.close()
        with self._lock:
            self._prefixes.clear()
            self._backend.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _adapt(self) -> ModelAdapter | None:
        try:
            adapter = adapter_for(self._model, windows=self._on_unsupported in {"calibrated", "measured"})
            check_model(adapter)
        except UnsupportedModelError as error:
            if self._on_unsupported in {"error", "measured"} or not error.servable:
                raise
            self._serve_unblended(error.reason)
            return None
        return adapter

    def _serve_unblended(self, reason: str) -> None:
        self._adapter = None
        self._prefixes.clear()
        self._continuation = Continuation(self._model, self._prefixes)
        reuse = "only beginnings of earlier prompts are reused" if self._continuation.works else "nothing is reused"
        logger.warning("%s It is served by plain full prefill: %s.", reason, reuse)

    def _follow(self, verdict: Verdict | None) -> None:
        """Let a verdict decide, for a model whose attention slides also whether it is blended at all."""
        if self._able is not None and self._able.slides and self._on_unsupported == "calibrated":
            if verdict is not None and verdict.passed:
                self._adapter = self._able
            elif self._adapter is not None:
                why = "it failed its calibration." if verdict else "run `rag-blend calibrate` on this store first."
                self._serve_unblended(f"{describe(self._model)} is not blended: its attention slides, and {why}")
        self._policies.adopt(None if self._adapter is None else verdict)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed: make a new one, BlendEngine.from_pretrained(...)")

    def _checked_ids(self, prompt: str | Sequence[int], add_special_tokens: bool | None) -> np.ndarray:
        self._require_open()
        ids = self._known_ids(prompt_ids(self.tokenizer, prompt, add_special_tokens))
        if len(ids) >= self.context_window:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, but the context window of {self.model_name} is "
                f"{self.context_window} tokens and must also hold the answer; retrieve fewer or shorter chunks"
            )
        return ids

    def _known_ids(self, ids: np.ndarray) -> np.ndarray:
        vocab_size = self._model.get_input_embeddings().num_embeddings
        if ids.max() >= vocab_size:
            raise ValueError(
                f"token id {ids.max()} is outside the vocabulary of {self.model_name} ({vocab_size} tokens)"
            )
        return ids

    def _prefetch_now(self, texts: Sequence[str]) -> None:
        try:
            chunks = enumerate(chunk_ids(self.tokenizer, texts))
            found = {key for number, ids in chunks for key in self._catalog.keys_in(ids, first=not number)}
            self._backend.prefetch(found)
        except Exception as error:  # it was a favour
            logger.warning("caches could not be fetched in advance: %s", error)

    def _ingest_now(self, texts: Sequence[PendingText]) -> None:
        self.ingest([text.text for text in texts], texts[0].head, [text.document for text in texts], progress=False)

    def _request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None,
        stop: str | Sequence[str] | None,
        add_special_tokens: bool | None,
        cancel: threading.Event | None,
        selector: str | TokenSelector | None,
        recompute_ratio: Ratio,
        reuse: bool,
        kwargs: dict[str, Any],
    ) -> Request:
        """See `generate`."""
        record = TraceRecorder()
        policy = self._policies.resolve(selector, recompute_ratio, reuse)
        ids = self._checked_ids(prompt, add_special_tokens)
        record.turn("queue")
        config = kwargs.get("generation_config") or self._model.generation_config
        wanted = min(wanted_tokens(max_new_tokens, config, len(ids)), self.context_window - len(ids))
        words, cancel = stop_strings(stop), cancel or threading.Event()
        return Request(ids, policy, wanted, words, cancel, None, kwargs, record)

    def _go_together(self, first: Request, second: Request) -> bool:
        adapter = self._adapter  # a verdict may end blending meanwhile
        if adapter is None or first.kwargs != second.kwargs:
            return False
        if not can_decode_together(self._model, first.kwargs):
            return False
        rotary, device = adapter.rotary, adapter.device
        lengths = {n for r in (first, second) for n in (len(r.ids), len(r.ids) + r.max_new_tokens)}
        angles = [rotary.frequencies(length, device) for length in lengths]
        return all(torch.equal(angles[0], other) for other in angles)

    def _on_answer(self, request: Request, generation: Generation) -> None:
        for answers in list(self._listeners.values()):
            answers.append(generation)
        self._recorder.answered(generation)
        if generation.stats.mode == "blend" and generation.token_ids:
            self._shadow.offer(ShadowQuery(request.ids, request.policy, generation.token_ids[:MAX_ANSWER_TOKENS]))

    def _logits_along(self, query: ShadowQuery, policy: BlendPolicy, stop: threading.Event) -> torch.Tensor | None:
        """Logits along an answer behind its prompt; None if that was to be blended and cannot be any more."""
        adapter = self._adapter
        if adapter is None:  # a verdict has ended blending
            return None

        def check(layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
            if stop.is_set():
                raise GenerationCancelledError("the engine is being closed")
            return hidden_states

        def call(cache: BlendCache) -> tuple[tuple[torch.Tensor, Cache], Sequence[int]]:
            with adapter.layer_hooks(check, cache):
                return self._server.forward(query.ids, cache), query.ids.tolist()

        if adapter.weights.changed():
            return None
        runner = PromptRunner(adapter, self._store, Controller(self._control.cost, "possible"))
        (logits, cache), stats = runner.run(query.ids, self._catalog, policy, call, TraceRecorder(), cancel=stop)
        if policy.reuse and stats.mode != "blend":
            return None
        return forced_logits(self._model, Prefill(logits, cache, stats), query.answer_ids)

    def _target(self) -> tuple[float, float]:
        """Mean KL and agreement that blending is to keep."""
        verdict = self._policies.verdict
        if verdict is None:
            return DEFAULT_TARGET_KL, DEFAULT_TARGET_AGREEMENT
        return verdict.target_kl, verdict.target_agreement

    def _run(
        self,
        ids: np.ndarray,
        policy: BlendPolicy,
        call: Callable[[BlendCache | None], tuple[T, Sequence[int]]],
        record: TraceRecorder,
        room: int = 0,
        cancel: threading.Event | None = None,
        with_prefixes: bool = True,
        seat: Space | None = None,
    ) -> tuple[T, GenerationStats]:
        record.turn("plan")
        if (self._adapter or self._continuation).weights.changed():
            policy = replace(policy, reuse=False)
        if self._adapter is None:
            record.turn("compute")
            value, stats = self._continuation.run(ids, not policy.is_check, call, room, with_prefixes)
            plan = BlendPlan(len(ids), (), stats.prefix_tokens)
            record.plan(plan, Findings([], [], [], []), plan)
            return value, stats
        runner = PromptRunner(self._adapter, self._store, self._control, self._prefixes if with_prefixes else None)
        # A blend is kept of what is answered alone: copying it would hold up the others of a batch.
        return runner.run(ids, self._catalog, policy, call, record, room, cancel, room > 0, seat)


def _controller_for(adapter: ModelAdapter, reuse_when: ReuseWhen, parallel_reads: int) -> Controller:
    control = Controller(cost_of(adapter), reuse_when, parallel_reads)
    if control.declines:
        for tokens, seconds in timed_prefills(adapter):
            control.learn_full(tokens, seconds)
    return control
