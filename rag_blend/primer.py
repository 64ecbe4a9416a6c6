"""Priming: the text that stands between head and chunk while the chunk is prefilled, and is then dropped.

A chunk cached directly behind the head believes it opens the context; in a prompt it mostly does not. Prefilled
behind some hundred tokens of other text, it looks as it will look in the middle of a prompt, at no cost per query.
(Neighbour priming: FusionRAG, arXiv 2601.12904; dropped dummy tokens: EPIC's LegoLink-0, arXiv 2410.15332.)

What is stored is the mean over several texts and the head alone: one text is one accident, and the mean lies closer to
what other texts would give (docs/how_it_works.md has the figures).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib import resources
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

from rag_blend.chunk import NO_TOKENS, Context, digest_ids, digest_json
from rag_blend.prompt import chunk_ids, chunk_separator
from rag_blend.store import KVStore

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, dtype=np.int32)
_KIND = "prime-sample"
_PASSAGES = 4  # a sample is drawn from at least this many passages
_SHARED_RUN = 16  # a chunk that shares so many consecutive tokens with a priming text is not primed with it
_OVERLAP_RUN = 8  # tokens by which an overlap is recognised
_GRAM = 4
_ALONE = 0.3  # weight of the cache behind the head alone in the mean that is stored of a primed chunk
_MIN_DISTINCT_GRAMS = 0.7  # prose is above 0.9
_MAX_SHARED_GRAMS = 0.15  # nor one that shares more of its 4-grams: prose of one collection shares under 5 %


class Priming(NamedTuple):
    """What a chunk is primed with.

    Attributes:
        texts: Token ids of the priming texts, int32; none for an unprimed chunk.
        kind: Stands in front of the digest where texts are too many to be known one by one.
    """

    texts: tuple[np.ndarray, ...]
    kind: str = ""

    @property
    def digest(self) -> str:
        """What the chunk names as its priming."""
        if not self.texts:
            return NO_TOKENS
        return self.kind + digest_json({"texts": [digest_ids(text) for text in self.texts], "alone": _ALONE})

    def contexts(self, head: np.ndarray) -> tuple[Context, ...]:
        """What the chunk is prefilled behind, and how the caches are weighted."""
        if not self.texts:
            return (Context(head, 1.0),)
        weight = (1.0 - _ALONE) / len(self.texts)
        return (*(Context(np.concatenate([head, text]), weight) for text in self.texts), Context(head, _ALONE))


UNPRIMED = Priming(())


@dataclass(frozen=True, slots=True)
class Sample:
    """Priming texts drawn from the collection: one more than a chunk needs, because it must not be primed with itself.

    Attributes:
        texts: Token ids of each.
        documents: The documents they were drawn from.
    """

    texts: tuple[np.ndarray, ...]
    documents: frozenset[str]

    @property
    def primes(self) -> frozenset[str]:
        """What chunks primed with some of its texts may name as their priming."""
        counts = range(1, len(self.texts) + 1)
        return frozenset(Priming(some).digest for count in counts for some in combinations(self.texts, count))

    def to_json(self, namespace: str) -> bytes:
        """As a small record, which tells whose it is: whoever forgets a document must find it."""
        record = {
            "kind": _KIND,
            "namespace": namespace,
            "documents": sorted(self.documents),
            "texts": [text.tolist() for text in self.texts],
        }
        return json.dumps({**record, "digest": digest_json(record)}).encode()

    @classmethod
    def from_json(cls, data: bytes, namespace: str) -> Sample:
        """From a record made by `to_json`.

        Raises:
            ValueError: It is damaged, something else, or of another tenant.
        """
        try:
            record = json.loads(data)
            kind, owner, digest = record["kind"], record["namespace"], record.pop("digest")
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a priming sample: {error}") from error
        if (kind, owner) != (_KIND, namespace):
            raise ValueError(f"not a priming sample of the tenant {namespace!r}")
        if digest_json(record) != digest:
            raise ValueError("a priming sample that does not match its digest")
        texts = tuple(np.asarray(text, dtype=np.int32) for text in record["texts"])
        return cls(texts, frozenset(record["documents"]))


class DrawnSamples(NamedTuple):
    """The recorded samples that were drawn from some documents.

    Attributes:
        records: Names of their records.
        primes: What chunks primed with their texts name as their priming.
    """

    records: tuple[str, ...]
    primes: frozenset[str]


class Primer:
    """Chooses the priming of each chunk, and says which ones are acceptable in stored chunks.

    Args:
        choice: ``"sample"``: drawn once from the first sizeable collection that is ingested, recorded in the store,
            the same ever after (a bundled neutral text until then). ``"preceding"``: what stands in front of the chunk
            in its document; a sample where there is nothing. ``"none"``: no priming. Anything else is the priming
            text itself.
        num_tokens: Length of a sampled or bundled priming text.
        num_texts: How many sampled texts a chunk is primed with, at least 1.
        tokenizer: The model's tokenizer.
        store: Where the sample is recorded.

    Raises:
        ValueError: `num_texts` or `num_tokens` is out of its range.
    """

    def __init__(
        self, choice: str, num_tokens: int, num_texts: int, tokenizer: PreTrainedTokenizerBase, store: KVStore
    ) -> None:
        if num_texts < 1 or num_tokens < 0:
            raise ValueError(f"prime_texts must be at least 1 and prime_tokens 0, got {num_texts} and {num_tokens}")
        self._store = store
        self._num_tokens = num_tokens
        self._num_texts = num_texts
        self._sampling = choice in {"sample", "preceding"} and num_tokens > 0
        self._preceding = f"preceding {num_tokens} " if choice == "preceding" and num_tokens > 0 else ""
        self._record = store.record_name(_KIND, f"{num_texts} of {num_tokens}")
        self._separator = chunk_separator(tokenizer)
        self._fixed = UNPRIMED  # until there is a sample, and for chunks that resemble all of it
        if self._sampling:
            bundled = (resources.files("rag_blend") / "data" / "prime.txt").read_text("utf-8")
            self._fixed = Priming((self._ended(chunk_ids(tokenizer, [bundled])[0])[-num_tokens:],))
        elif choice not in {"none", "sample", "preceding"}:
            self._fixed = Priming((self._ended(chunk_ids(tokenizer, [choice])[0]),))
        self._sample: Sample | None = None
        self._texts: list[_PrimingText] = []
        self.reload()

    def accepts(self, prime: str) -> bool:
        """Whether chunks that name this priming may be reused."""
        return prime in self._digests or bool(self._preceding and prime.startswith(self._preceding))

    def reload(self) -> None:
        """Take over the sample that this or another process has recorded, or that it was dropped."""
        self._sample = self._recorded_sample() if self._sampling else None
        self._texts = [_PrimingText(text) for text in self._sample.texts] if self._sample else []
        self._digests = {self._fixed.digest, *(self._sample.primes if self._sample else ())}

    def learn(self, chunks: Sequence[np.ndarray], documents: Sequence[str]) -> None:
        """Draw and record the sample, if there is none yet and the collection is large enough."""
        if not self._sampling:
            return
        self.reload()  # another process may have forgotten the document that the sample came from
        if self._sample is not None:
            return
        sample = draw_sample(chunks, documents, self._num_tokens, self._num_texts + 1, self._separator)
        if sample is not None:
            self._store.backend.put_record(self._record, sample.to_json(self._store.namespace))
            self.reload()  # another process may have been first

    def drawn_from(self, documents: AbstractSet[str]) -> DrawnSamples:
        """The tenant's samples, of all models and lengths, that were drawn from one of these documents.

        Raises:
            OSError: A record cannot be read, so it is not known where it came from.
        """
        samples: dict[str, Sample] = {}
        for name in self._store.backend.records():
            try:
                sample = Sample.from_json(self._store.backend.get_record(name) or b"", self._store.namespace)
            except ValueError:
                continue
            if sample.documents & documents:
                samples[name] = sample
        return DrawnSamples(tuple(samples), frozenset[str]().union(*(sample.primes for sample in samples.values())))

    def drop(self, samples: DrawnSamples) -> None:
        """Delete samples, once nothing is stored any more that was primed with them.

        Raises:
            OSError: The medium refused.
        """
        for name in samples.records:
            self._store.backend.delete_record(name)
        self.reload()

    def primings_of(self, chunks: Sequence[np.ndarray], documents: Sequence[str]) -> Iterator[Priming]:
        """The priming of each chunk; chunks of one document are taken to stand in it in this order.

        Args:
            chunks: Token ids of each.
            documents: The document of each, "" for none.
        """
        in_front: dict[str, np.ndarray] = {}
        for chunk, document in zip(chunks, documents, strict=True):
            before = in_front.get(document, _NOTHING)
            yield (self._preceding_of(chunk, before) if self._preceding else None) or self.priming_of(chunk)
            if document:
                in_front[document] = self._ended(np.concatenate([before, chunk]))[-self._num_tokens :]

    def priming_of(self, chunk: np.ndarray) -> Priming:
        """The first sampled texts that do not resemble the chunk; the bundled or given one if all do."""
        unlike = (text.token_ids for text in self._texts if not text.resembles(chunk))
        texts = tuple(islice(unlike, self._num_texts))
        return Priming(texts) if texts else self._fixed

    def _preceding_of(self, chunk: np.ndarray, before: np.ndarray) -> Priming | None:
        text = without_overlap(before, chunk)
        if len(text) < _SHARED_RUN or _PrimingText(text).resembles(chunk):
            return None
        return Priming((text,), self._preceding)

    def _ended(self, text: np.ndarray) -> np.ndarray:
        return np.concatenate([text, self._separator])

    def _recorded_sample(self) -> Sample | None:
        try:
            data = self._store.backend.get_record(self._record)
            if data is None:
                return None
            try:
                return Sample.from_json(data, self._store.namespace)
            except ValueError:
                logger.warning("the recorded priming sample is damaged; a new one will be drawn")
                self._store.backend.delete_record(self._record)
        except OSError as error:
            logger.warning("the recorded priming sample cannot be read: %s", error)
            return self._sample
        return None


def draw_sample(
    chunks: Sequence[np.ndarray], documents: Sequence[str], num_tokens: int, num_texts: int, separator: np.ndarray
) -> Sample | None:
    """Disjoint priming texts of `num_tokens` each from several passages of a collection.

    The choice depends on the passages' contents only, not on their order. Of long passages the end is taken, and
    behind each stands the separator, as it will in front of a chunk in a prompt.

    Returns:
        None when the collection is not four times as long as the texts and varied (too many of its chunks would be
        primed with parts of themselves), or has too few passages.
    """
    # Repetitive passages (tables, numbered items) make chunks continue the pattern instead of reading themselves.
    varied = [pair for pair in zip(chunks, documents, strict=True) if _is_varied(pair[0])]
    # Of copies, one that belongs to a document counts: it must be known when that document is forgotten.
    passages = sorted(varied, key=lambda passage: passage[1] != "")
    unique = {chunk.tobytes(): (chunk, document) for chunk, document in passages}
    if sum(len(chunk) for chunk, _ in unique.values()) < 4 * num_texts * num_tokens:
        return None
    order = sorted(unique, key=lambda raw: hashlib.sha256(raw).digest())
    texts, sources = [], set()
    longest = max(_SHARED_RUN, num_tokens // _PASSAGES - len(separator))
    for _ in range(num_texts):
        text = _NOTHING
        while len(text) < num_tokens and order:
            chunk, document = unique[order.pop()]
            text = np.concatenate([text, chunk[-longest:], separator])
            sources.add(document)
        if len(text) < num_tokens:
            return None
        texts.append(text[-num_tokens:])
    return Sample(tuple(texts), frozenset(sources - {""}))


def without_overlap(before: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """What stands in front of a chunk, without the part that the chunk itself begins with (splitters' overlap)."""
    start = chunk[1 : 1 + _OVERLAP_RUN]  # the very first token may be another one at the edge of a text
    if len(start) < _OVERLAP_RUN or len(before) < _OVERLAP_RUN:
        return before
    found = np.flatnonzero((sliding_window_view(before, _OVERLAP_RUN) == start).all(axis=1))
    return before[: max(0, int(found[-1]) - 1)] if len(found) else before


class _PrimingText:
    """A priming text that can tell whether a chunk repeats it.

    A chunk primed with its own likeness (a neighbour of the same table, form or boilerplate) copies from the priming
    text, which then is not there in the prompt.
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self._runs = set(_grams(token_ids, _SHARED_RUN))
        self._grams = set(_grams(token_ids, _GRAM))

    def resembles(self, chunk: np.ndarray) -> bool:
        """Whether they share a long run, or many short ones."""
        if not self._runs.isdisjoint(_grams(chunk, _SHARED_RUN)):
            return True
        grams = _grams(chunk, _GRAM)
        return sum(gram in self._grams for gram in grams) > _MAX_SHARED_GRAMS * len(grams)


def _is_varied(chunk: np.ndarray) -> bool:
    grams = _grams(chunk, _GRAM)
    return len(set(grams)) >= _MIN_DISTINCT_GRAMS * len(grams)


def _grams(ids: np.ndarray, length: int) -> list[bytes]:
    return [ids[i : i + length].tobytes() for i in range(len(ids) - length + 1)]
