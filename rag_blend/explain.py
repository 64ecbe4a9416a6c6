"""A prompt in words: for every stretch of it what became of it and why, and what to do where nothing was reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rag_blend.chunk import GENERIC_HEAD, NO_TOKENS, ChunkOrigin
from rag_blend.engine import BlendEngine
from rag_blend.generation import Generation, Prefill
from rag_blend.ingest import MIN_CHUNK_TOKENS, read_head
from rag_blend.label import read_label
from rag_blend.picture_pieces import excerpt_of
from rag_blend.prompt import EDGE_TOKENS, common_prefix
from rag_blend.storage import StorageBackend
from rag_blend.store import KVStore
from rag_blend.trace import Trace, TracedChunk

_SHORT_PROMPT = 64


@dataclass(frozen=True, slots=True)
class Stretch:
    """Prompt tokens `start` to `end` (exclusive) that lie in one stored chunk, or in none.

    Attributes:
        start: First prompt position.
        end: One past the last one.
        chunk: Number of the chunk in the trace, from 1; None: in none.
        text: How it begins.
        why: What became of it, and why.
    """

    start: int
    end: int
    chunk: int | None
    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found.

    Attributes:
        served: What the engine made of the prompt.
        stretches: All of the prompt, in order.
        hints: What would let more be reused; empty where nothing is amiss.
    """

    served: Prefill | Generation
    stretches: tuple[Stretch, ...]
    hints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Census:
    """Whose chunks a store holds. `origins` are those of the engine's model and namespace, by key, heads included."""

    origins: dict[str, ChunkOrigin]
    other_models: int
    other_namespaces: int

    @property
    def num_heads(self) -> int:
        return sum(origin.is_head for origin in self.origins.values())

    @classmethod
    def of(cls, backend: StorageBackend, fingerprint: str, namespace: str) -> _Census:
        listed = (read_label(label, key) for key, label in backend.labels())
        origins = {chunk.key: chunk.origin for chunk in listed if chunk is not None}
        own = {k: o for k, o in origins.items() if (o.fingerprint, o.namespace) == (fingerprint, namespace)}
        others = [origin for key, origin in origins.items() if key not in own and not origin.is_head]
        of_other_models = sum(origin.fingerprint != fingerprint for origin in others)
        return cls(own, of_other_models, len(others) - of_other_models)

    def is_head(self, chunk: TracedChunk) -> bool:
        return chunk.key in self.origins and self.origins[chunk.key].is_head


def explain(engine: BlendEngine, backend: StorageBackend, namespace: str, served: Prefill | Generation) -> Explanation:
    """Say what became of a prompt, and why.

    Args:
        engine: Has served it.
        backend: The engine's storage.
        namespace: The engine's.
        served: What it made of the prompt.

    Raises:
        OSError: The store cannot be listed.
    """
    assert served.trace is not None  # what an engine returns has one
    census = _Census.of(backend, engine.fingerprint, namespace)
    reader = _Reader(served.trace, census, KVStore(backend, engine.fingerprint, namespace, torch.float16))
    return Explanation(served, tuple(reader.stretches()), tuple(_hints(engine, census, served.trace, reader)))


class _Reader:
    """Reads a trace aloud."""

    def __init__(self, trace: Trace, census: _Census, store: KVStore) -> None:
        self._trace = trace
        self._census = census
        self._store = store
        self._owners = trace.owners()

    def stretches(self) -> Iterator[Stretch]:
        """All stretches, in order."""
        cuts = np.flatnonzero(np.diff(self._owners)) + 1
        for start, end in pairwise([0, *cuts.tolist(), len(self._trace)]):
            owner = int(self._owners[start])
            why = self._why_fresh(start, end) if owner < 0 else self._why(self._trace.chunks[owner])
            text = excerpt_of(self._trace.tokenizer, self._trace.token_ids[start:end])
            yield Stretch(start, end, owner + 1 if owner >= 0 else None, text, why)

    def other_head(self, chunk: TracedChunk) -> str:
        """Where the prompt and the head of a chunk that stands behind another one part."""
        origin = self._census.origins.get(chunk.key)
        head = None if origin is None else read_head(self._store, origin.head)
        if head is None:
            return "behind a head that is not known any more"
        same = common_prefix(head, self._trace.token_ids)
        parts = head[same:], self._trace.token_ids[same : same + len(head)]
        there, here = (excerpt_of(self._trace.tokenizer, part, 40) for part in parts)
        parting = f"goes on from token {same}" if same else "begins"
        return f'behind a head of {_count(len(head), "token")} which {parting} with "{there}", not with "{here}"'

    def _why(self, chunk: TracedChunk) -> str:
        origin = self._census.origins.get(chunk.key)
        part = "" if len(chunk) == chunk.num_tokens else f"{len(chunk)} of the chunk's {chunk.num_tokens} tokens; "
        match chunk.outcome:
            case "exact":
                is_head = self._census.is_head(chunk)
                return f"{part}the head, as it was cached" if is_head else f"{part}cached behind this very text"
            case "blended":
                return f"{part}{_why_not_exact(origin)}"
            case "declined":
                return "stored, but computing it was expected to take no longer"
            case "elsewhere":
                return f"stored, but {self.other_head(chunk)}"
            case "damaged":
                return "its entry is damaged; the next ingestion writes it anew"
            case "lost":
                return "its entry is gone, or the storage did not deliver it"

    def _why_fresh(self, start: int, end: int) -> str:
        cuts, missing = self._cut_edges(start, end)
        alone = missing >= end - start and end < len(self._trace)  # then the cut explains it all
        return "; ".join(cuts if alone else [*cuts, self._what_it_is(start, end)])

    def _cut_edges(self, start: int, end: int) -> tuple[list[str], int]:
        """What of the chunks on both sides is missing here, and how many tokens that is."""
        before, after = self._hit_at(start - 1), self._hit_at(end)
        cuts = []
        total = 0
        for number, missing, which in (
            (before, self._trace.chunks[before].cut_behind if before >= 0 else 0, "last"),
            (after, self._trace.chunks[after].offset if after >= 0 else 0, "first"),
        ):
            total += missing
            tokens = f"the {which} {_count(missing, 'token')} of chunk {number + 1}"
            if missing > EDGE_TOKENS:
                cuts.append(f"{tokens} do not stand here, or have changed: it is cut")
            elif missing:
                cuts.append(f"{tokens}, spelt with other tokens where it meets its neighbour")
        return cuts, total

    def _what_it_is(self, start: int, end: int) -> str:
        if not any(chunk.is_hit for chunk in self._trace.chunks):
            return "in no stored chunk"
        if end == len(self._trace):
            return "behind the last chunk: the question is always computed"
        if start == 0:
            return f"the head: reused from {MIN_CHUNK_TOKENS} tokens on, if chunks were cached behind it"
        if not str(self._trace.tokenizer.decode(self._trace.token_ids[start:end].tolist())).strip():
            return "a separator"
        return "in no stored chunk: a metadata header, say, that was not cached with its text"

    def _hit_at(self, position: int) -> int:
        """Which chunk is reused at a position; -1: none."""
        owner = int(self._owners[position]) if 0 <= position < len(self._owners) else -1
        return owner if owner >= 0 and self._trace.chunks[owner].is_hit else -1


def _why_not_exact(origin: ChunkOrigin | None) -> str:
    if origin is not None and origin.prime != NO_TOKENS:
        return "blended: cached behind the head and a priming text"
    if origin is not None and origin.head == GENERIC_HEAD:
        return "blended: cached without a head"
    return "blended: cached behind the head, not behind all that stands in front of it here"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _hints(engine: BlendEngine, census: _Census, trace: Trace, reader: _Reader) -> Iterator[str]:
    if engine.policy.full_prefill:
        yield f"this engine answers by full prefill: {engine.policy}; `rag-blend doctor` and `rag-blend calibrate` tell"
        return
    elsewhere = [chunk for chunk in trace.chunks if chunk.outcome == "elsewhere"]
    if elsewhere:
        yield (
            f"{_count(len(elsewhere), 'chunk')} of this prompt cached {reader.other_head(elsewhere[0])}: "
            "ingest them with the head this prompt begins with, or use any_head=True"
        )
    declined = [chunk for chunk in trace.chunks if chunk.outcome == "declined"]
    if declined:
        yield f"{_count(len(declined), 'chunk')} left alone, since computing takes no longer (reuse_when)"
    broken = sum(chunk.outcome in ("lost", "damaged") for chunk in trace.chunks)
    if broken:
        yield f"{_count(broken, 'chunk')} lost or damaged: ingest again, and see `rag-blend store verify`"
    if not trace.kept and all(census.is_head(chunk) for chunk in trace.chunks):
        yield from _why_nothing_is_found(engine, census, len(trace))


def _why_nothing_is_found(engine: BlendEngine, census: _Census, num_tokens: int) -> Iterator[str]:
    usable, stored = (count - census.num_heads for count in (engine.num_chunks, len(census.origins)))
    if not stored + census.other_models + census.other_namespaces:
        yield "the store is empty: ingest the documents first"
        return
    if usable:
        yield f"no chunk of this prompt is stored for this model and namespace, which have {usable}"
    else:
        yield "the store holds no chunk that this engine can use"
    others = stored - usable - (engine.num_copies if usable else 0)  # copies are used with their chunks only
    if others > 0:
        primed = f"{_count(others, 'chunk')} primed in another way"
        yield f"{primed}: give prime, prime_tokens and prime_texts as they were ingested"
    if census.other_models:
        yield (
            f"the store holds {_count(census.other_models, 'chunk')} of another model fingerprint: other weights, "
            "tokenizer, configuration or dtype than this model has"
        )
    if census.other_namespaces:
        yield f"the store holds {_count(census.other_namespaces, 'chunk')} of other namespaces"
    if num_tokens < _SHORT_PROMPT:
        yield (
            f"the prompt has {_count(num_tokens, 'token')}: give the whole one, with the retrieved texts, as the model "
            f"gets it; stretches under {MIN_CHUNK_TOKENS} tokens are not looked for"
        )
