"""Priming texts: what they are, and how they are drawn from a collection and recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rag_blend.chunk import NO_TOKENS, Context, digest_ids, digest_json
from rag_blend.likeness import SHARED_RUN, is_varied
from rag_blend.storage import StorageBackend

KIND = "prime-sample"  # of the record
_PASSAGES = 4  # a sample is drawn from at least this many passages
_ALONE = 0.3  # weight of the cache behind the head alone in the mean that is stored of a primed chunk
_NOTHING = np.empty(0, dtype=np.int32)


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
            "kind": KIND,
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
        if (kind, owner) != (KIND, namespace):
            raise ValueError(f"not a priming sample of the tenant {namespace!r}")
        if digest_json(record) != digest:
            raise ValueError("a priming sample that does not match its digest")
        texts = tuple(np.asarray(text, dtype=np.int32) for text in record["texts"])
        return cls(texts, frozenset(record["documents"]))


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
    varied = [pair for pair in zip(chunks, documents, strict=True) if is_varied(pair[0])]
    # Of copies, one that belongs to a document counts: it must be known when that document is forgotten.
    passages = sorted(varied, key=lambda passage: passage[1] != "")
    unique = {chunk.tobytes(): (chunk, document) for chunk, document in passages}
    if sum(len(chunk) for chunk, _ in unique.values()) < 4 * num_texts * num_tokens:
        return None
    order = sorted(unique, key=lambda raw: hashlib.sha256(raw).digest())
    texts, sources = [], set()
    longest = max(SHARED_RUN, num_tokens // _PASSAGES - len(separator))
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


class DrawnSamples(NamedTuple):
    """The recorded samples that were drawn from some documents.

    Attributes:
        records: Names of their records.
        primes: What chunks primed with their texts name as their priming.
    """

    records: tuple[str, ...]
    primes: frozenset[str]


def samples_drawn_from(backend: StorageBackend, documents: AbstractSet[str], namespace: str) -> DrawnSamples:
    """A tenant's samples, of all models and lengths, that were drawn from one of these documents.

    Raises:
        OSError: A record cannot be read, so it is not known where it came from.
    """
    samples: dict[str, Sample] = {}
    for name in backend.records():
        try:
            sample = Sample.from_json(backend.get_record(name) or b"", namespace)
        except ValueError:
            continue
        if sample.documents & documents:
            samples[name] = sample
    return DrawnSamples(tuple(samples), frozenset[str]().union(*(sample.primes for sample in samples.values())))
