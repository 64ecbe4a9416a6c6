"""Priming: the text that stands between head and chunk while the chunk is prefilled, and is then dropped.

A chunk cached directly behind the head believes it opens the context; in a prompt it mostly does not. Prefilled
behind some hundred tokens of other text, it looks as it will look in the middle of a prompt, at no cost per query.
(Neighbour priming: FusionRAG, arXiv 2601.12904; dropped dummy tokens: EPIC's LegoLink-0, arXiv 2410.15332.)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rag_blend.chunk import digest_ids, digest_json
from rag_blend.prompt import chunk_ids
from rag_blend.store import KVStore

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, dtype=np.int32)
_KIND = "prime-sample"
_PASSAGES = 4  # a sample is drawn from at least this many passages
_SHARED_RUN = 16  # a chunk that shares so many consecutive tokens with a priming text is not primed with it
_GRAM = 4
_MIN_DISTINCT_GRAMS = 0.7  # prose is above 0.9
_MAX_SHARED_GRAMS = 0.15  # nor one that shares more of its 4-grams: prose of one collection shares under 5 %


@dataclass(frozen=True, slots=True)
class Sample:
    """Two priming texts drawn from the collection, so that a chunk which is in one is primed with the other.

    Attributes:
        texts: Token ids of each.
        documents: The documents they were drawn from.
    """

    texts: tuple[np.ndarray, ...]
    documents: frozenset[str]

    @property
    def primes(self) -> frozenset[str]:
        """The digests of its texts."""
        return frozenset(digest_ids(text) for text in self.texts)

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
        primes: Digests of their texts.
    """

    records: tuple[str, ...]
    primes: frozenset[str]


class Primer:
    """Chooses the priming text of each chunk, and says which ones are acceptable in stored chunks.

    Args:
        choice: ``"sample"``: drawn once from the first sizeable collection that is ingested, recorded in the store,
            the same ever after (a bundled neutral text until then). ``"none"``: no priming. Anything else is the
            priming text itself.
        num_tokens: Length of a sampled or bundled priming text.
        tokenizer: The model's tokenizer.
        store: Where the sample is recorded.
    """

    def __init__(self, choice: str, num_tokens: int, tokenizer: PreTrainedTokenizerBase, store: KVStore) -> None:
        self._store = store
        self._num_tokens = num_tokens
        self._sampling = choice == "sample" and num_tokens > 0
        self._record = store.record_name(_KIND, str(num_tokens))
        if self._sampling:
            bundled = (resources.files("rag_blend") / "data" / "prime.txt").read_text("utf-8")
            self._fixed = chunk_ids(tokenizer, [bundled])[0][:num_tokens]
        else:
            self._fixed = _NOTHING if choice in {"none", "sample"} else chunk_ids(tokenizer, [choice])[0]
        self._sample: Sample | None = None
        self._texts: list[_PrimingText] = []
        self.reload()

    def accepts(self, prime: str) -> bool:
        """Whether chunks primed with the text of this digest may be reused."""
        return prime in self._digests

    def reload(self) -> None:
        """Take over the sample that this or another process has recorded, or that it was dropped."""
        self._sample = self._recorded_sample() if self._sampling else None
        self._texts = [_PrimingText(text) for text in (*(self._sample.texts if self._sample else ()), self._fixed)]
        self._digests = {digest_ids(text.token_ids) for text in self._texts}

    def learn(self, chunks: Sequence[np.ndarray], documents: Sequence[str]) -> None:
        """Draw and record the sample, if there is none yet and the collection is large enough."""
        if not self._sampling:
            return
        self.reload()  # another process may have forgotten the document that the sample came from
        if self._sample is not None:
            return
        sample = draw_sample(chunks, documents, self._num_tokens)
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

    def text_for(self, chunk: np.ndarray) -> np.ndarray:
        """Priming token ids for a chunk: the first text that does not resemble it, else the bundled or given one."""
        return next((text for text in self._texts if not text.resembles(chunk)), self._texts[-1]).token_ids

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


def draw_sample(chunks: Sequence[np.ndarray], documents: Sequence[str], num_tokens: int) -> Sample | None:
    """Two disjoint priming texts of `num_tokens` each from several passages of a collection.

    The choice depends on the passages' contents only, not on their order.

    Returns:
        None when the collection has less than eight times `num_tokens` of varied text (too many of its chunks would
        be primed with parts of themselves), or too few passages.
    """
    # Repetitive passages (tables, numbered items) make chunks continue the pattern instead of reading themselves.
    varied = [pair for pair in zip(chunks, documents, strict=True) if _is_varied(pair[0])]
    # Of copies, one that belongs to a document counts: it must be known when that document is forgotten.
    passages = sorted(varied, key=lambda passage: passage[1] != "")
    unique = {chunk.tobytes(): (chunk, document) for chunk, document in passages}
    if sum(len(chunk) for chunk, _ in unique.values()) < 8 * num_tokens:
        return None
    order = sorted(unique, key=lambda raw: hashlib.sha256(raw).digest())
    texts, sources = [], set()
    for _ in range(2):
        parts: list[np.ndarray] = []
        while (missing := num_tokens - sum(len(part) for part in parts)) > 0 and order:
            chunk, document = unique[order.pop()]
            parts.append(chunk[: min(missing, max(_SHARED_RUN, num_tokens // _PASSAGES))])
            sources.add(document)
        if missing > 0:
            return None
        texts.append(np.concatenate(parts))
    return Sample(tuple(texts), frozenset(sources - {""}))


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
