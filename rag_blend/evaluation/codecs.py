"""The codec bench: what a codec saves, what writing and reading it costs, and how far it moves the answers."""

from __future__ import annotations

import functools
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.chunk import ChunkKV, LayerKV
from rag_blend.codecs import Codec, codec_of
from rag_blend.engine import BlendEngine
from rag_blend.entry import EntryHeader, encode_entry, read_header, read_layer
from rag_blend.evaluation import prompts
from rag_blend.evaluation.bootstrap import mean_interval
from rag_blend.evaluation.cases import Case, ingestible
from rag_blend.evaluation.codec_report import CodecReport, CodecResult
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.reference import reference_of, require_fit
from rag_blend.evaluation.results import Fidelity
from rag_blend.generation import Prefill
from rag_blend.label import label_of
from rag_blend.storage import EntryReader, StorageBackend, open_storage
from rag_blend.storage.memory import MemoryBackend
from rag_blend.teacher import forced_logits

logger = logging.getLogger(__name__)
T = TypeVar("T")

RAW = "raw"
_REPEATS = 3  # of what is timed; the fastest counts, for nothing makes code faster than it is
_NOTHING = "no case has a passage that can be reused, so codecs make no difference"


def measure_codecs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    codecs: Sequence[str],
    directory: str | os.PathLike[str],
    policy: Policy | None = None,
    max_new_tokens: int = 32,
    progress: bool = True,
) -> CodecReport:
    """Prefill the cases' passages once, write them down with each codec, and answer from each store.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cases: Questions and their passages.
        codecs: Names of codecs; ``"raw"`` is measured in any case, first.
        directory: Holds the stores while this runs; they are removed at the end.
        policy: How answers are blended. None: as the engine does by default.
        max_new_tokens: Longest answer.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A case does not fit the context window.
        ValueError: No codec has one of the names, or no case has a passage that is long enough to be reused.
        ModuleNotFoundError: A codec needs a library that is not installed.
        OSError: The directory cannot be used.
    """
    policy = policy or Policy("default")
    chosen = [codec_of(name) for name in dict.fromkeys([RAW, *codecs])]
    Path(directory).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="kv-", dir=directory)))

        def engine_on(backend: StorageBackend) -> BlendEngine:
            return stack.enter_context(
                BlendEngine(
                    model,
                    tokenizer,
                    backend,
                    **{"reuse_when": "possible", **policy.engine_arguments},
                    prefix_cache_bytes=0,
                )
            )

        source = open_storage(root / "computed")
        _ingest(engine_on(source), cases, max_new_tokens, progress)
        costs, engines = {}, {}
        for codec in tqdm(chosen, desc="codecs", disable=not progress):
            backend = open_storage(root / codec.name)
            costs[codec.name] = _rewrite(source, backend, codec)
            engines[codec.name] = engine_on(backend)
        answers = list(_answers(model, engines, policy, cases, max_new_tokens, progress))
    if not answers:
        raise ValueError(_NOTHING)
    environment = {**environment_of(model), "max_new_tokens": str(max_new_tokens)}
    results = [_result(name, costs, [answer[name] for answer in answers]) for name in engines]
    return CodecReport(results, environment, policy.describe(), [answer[RAW].prompt_tokens for answer in answers])


@dataclass(slots=True)
class _Cost:
    """Sums over the entries of a store. Of `numbers` and everything below, only entries of the codec itself."""

    num_bytes: int = 0
    tokens: int = 0
    numbers: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    key_errors: list[float] = field(default_factory=list)
    value_errors: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Answer:
    to_full: Fidelity
    to_raw: Fidelity
    ttft_s: float
    prompt_tokens: int


def _ingest(engine: BlendEngine, cases: Sequence[Case], max_new_tokens: int, progress: bool) -> None:
    for case in cases:
        require_fit(engine, case, len(prompts.case_ids(engine.tokenizer, case)), max_new_tokens)
    passages = ingestible(cases)
    head, documents = prompts.head_ids(engine.tokenizer), list(passages.values())
    if not engine.ingest(list(passages), head, documents, progress).chunks:
        raise ValueError(_NOTHING)


def _rewrite(source: StorageBackend, target: StorageBackend, codec: Codec) -> _Cost:
    """Copy a store, its entries written by another codec."""
    for name in source.records():
        target.put_record(name, source.get_record(name) or b"")
    cost = _Cost()
    for key in source.keys():
        with source.open(key) as reader:
            header = read_header(reader, key)
            layers = [LayerKV(*(side.float() for side in layer)) for layer in _layers(reader, header)]
        chunk = ChunkKV(header.origin, header.token_ids, layers, header.staleness)
        data, write_s = _timed(functools.partial(encode_entry, chunk, header.dtype, codec))
        target.write(key, data, label_of(chunk.origin, chunk.token_ids))
        cost.num_bytes += len(data)
        cost.tokens += len(chunk.token_ids)
        _read_back(key, data, layers, codec, write_s, cost)
    return cost


def _read_back(key: str, data: bytes, written: Sequence[LayerKV], codec: Codec, write_s: float, cost: _Cost) -> None:
    memory = MemoryBackend()
    memory.write(key, data)
    with memory.open(key) as reader:
        header = read_header(reader, key)
        if header.codec.name != codec.name:
            return
        layers, read_s = _timed(lambda: [_in_float32(layer) for layer in _layers(reader, header)])
    cost.write_s += write_s
    cost.read_s += read_s
    for layer, wanted in zip(layers, written, strict=True):
        cost.numbers += 2 * layer.keys.numel()
        cost.key_errors.append(_relative_error(layer.keys, wanted.keys))
        cost.value_errors.append(_relative_error(layer.values, wanted.values))


def _layers(reader: EntryReader, header: EntryHeader) -> Iterator[LayerKV]:
    return (read_layer(reader, header, layer_idx) for layer_idx in range(len(header.offsets)))


def _in_float32(layer: LayerKV) -> LayerKV:
    """A copy, whatever the dtype was: into such buffers the prefetcher writes what it has read."""
    return LayerKV(*(torch.empty(side.shape).copy_(side) for side in layer))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and how many seconds it took when it was fastest."""
    fastest = math.inf
    for _ in range(_REPEATS):
        started = time.perf_counter()
        value = call()
        fastest = min(fastest, time.perf_counter() - started)
    return value, fastest


def _answers(
    model: PreTrainedModel,
    engines: Mapping[str, BlendEngine],
    policy: Policy,
    cases: Sequence[Case],
    max_new_tokens: int,
    progress: bool,
) -> Iterator[dict[str, _Answer]]:
    """What each codec makes of those cases in which anything is reused; codecs take turns in being first."""
    names, plain = list(engines), engines[RAW]
    for number, case in enumerate(tqdm(cases, desc="cases", disable=not progress)):
        ids = prompts.case_ids(plain.tokenizer, case)
        if plain.prefill(ids, **policy.call_arguments).stats.mode != "blend":  # and if so, all is warm
            logger.warning("case %s is left out: none of its passages is blended", case.id)
            continue
        reference, full = reference_of(plain, ids, max_new_tokens)
        turn = number % len(names)
        stats, logits = {}, {}
        for name in names[turn:] + names[:turn]:
            prefill: Prefill = engines[name].prefill(ids, **policy.call_arguments)
            stats[name] = prefill.stats
            logits[name] = forced_logits(model, prefill, reference.token_ids)
        yield {
            name: _Answer(
                to_full=Fidelity.between(full, logits[name]),
                to_raw=Fidelity.between(logits[RAW], logits[name]),
                ttft_s=stats[name].ttft_s,
                prompt_tokens=len(ids),
            )
            for name in names
        }


def _result(name: str, costs: Mapping[str, _Cost], answers: Sequence[_Answer]) -> CodecResult:
    cost, raw = costs[name], costs[RAW]
    return CodecResult(
        codec=name,
        bytes_per_token=cost.num_bytes / cost.tokens,
        ratio=raw.num_bytes / cost.num_bytes,
        write_gb_s=2e-9 * cost.numbers / cost.write_s,
        read_gb_s=2e-9 * cost.numbers / cost.read_s,
        key_error=statistics.fmean(cost.key_errors),
        value_error=statistics.fmean(cost.value_errors),
        kl=mean_interval([answer.to_full.kl for answer in answers]),
        agreement=mean_interval([answer.to_full.agreement for answer in answers]),
        kl_to_raw=mean_interval([answer.to_raw.kl for answer in answers]),
        agreement_with_raw=mean_interval([answer.to_raw.agreement for answer in answers]),
        ttft_s=statistics.median(answer.ttft_s for answer in answers),
    )
