"""Priming: the text that stands between head and chunk while the chunk is prefilled, and is then dropped.

A chunk cached directly behind the head believes it opens the context; in a prompt it mostly does not. Prefilled
behind some hundred tokens of other text, it looks as it will look in the middle of a prompt, at no cost per query.
(Neighbour priming: FusionRAG, arXiv 2601.12904; dropped dummy tokens: EPIC's LegoLink-0, arXiv 2410.15332.)

What is stored is the mean over several texts and the head alone: one text is one accident, and the mean lies closer to
what other texts would give (docs/how_it_works.md has the figures).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from importlib import resources
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from rag_blend.likeness import SHARED_RUN, PrimingText, without_overlap
from rag_blend.prompt import chunk_ids, chunk_separator
from rag_blend.sample import KIND, UNPRIMED, DrawnSamples, Priming, Sample, draw_sample, samples_drawn_from
from rag_blend.store import KVStore

logger = logging.getLogger(__name__)

CHOICES = ("none", "sample", "preceding")  # anything else is a text
_NOTHING = np.empty(0, dtype=np.int32)


class Primer:
    """Chooses the priming of each chunk, and says which ones are acceptable in stored chunks.

    Args:
        choice: ``"sample"``: drawn once from the first sizeable collection that is ingested, recorded in the store,
            the same ever after (a bundled neutral text until then). ``"preceding"``: what stands in front of the chunk
            in its document; a sample where there is nothing. ``"none"``: no priming. Anything else is the priming
            text itself.
        num_tokens: Length of a sampled or bundled priming text.
        num_texts: How many sampled texts a chunk is primed with, at least 1.
        exact_first: Whether unprimed copies are wanted as well, for where a chunk stands first in a prompt.
        tokenizer: The model's tokenizer.
        store: Where the sample is recorded.

    Raises:
        ValueError: `num_texts` or `num_tokens` is out of its range.
    """

    def __init__(
        self,
        choice: str,
        num_tokens: int,
        num_texts: int,
        exact_first: bool,
        tokenizer: PreTrainedTokenizerBase,
        store: KVStore,
    ) -> None:
        if num_texts < 1 or num_tokens < 0:
            raise ValueError(f"prime_texts must be at least 1 and prime_tokens 0, got {num_texts} and {num_tokens}")
        self._store = store
        self._num_tokens = num_tokens
        self._num_texts = num_texts
        self._sampling = choice in {"sample", "preceding"} and num_tokens > 0
        self._preceding = f"preceding {num_tokens} " if choice == "preceding" and num_tokens > 0 else ""
        self._record = store.record_name(KIND, f"{num_texts} of {num_tokens}")
        self._separator = chunk_separator(tokenizer)
        self._fixed = UNPRIMED  # until there is a sample, and for chunks that resemble all of it
        if self._sampling:
            bundled = (resources.files("rag_blend") / "data" / "prime.txt").read_text("utf-8")
            self._fixed = Priming((self._ended(chunk_ids(tokenizer, [bundled])[0])[-num_tokens:],))
        elif choice not in CHOICES:
            self._fixed = Priming((self._ended(chunk_ids(tokenizer, [choice])[0]),))
        self.keeps_copies = exact_first and self._fixed.digest != UNPRIMED.digest  # of each chunk, unprimed
        self._sample: Sample | None = None
        self._texts: list[PrimingText] = []
        self.reload()

    def accepts(self, prime: str) -> bool:
        """Whether chunks that name this priming may be reused."""
        if self.keeps_copies and prime == UNPRIMED.digest:
            return True
        return prime in self._digests or bool(self._preceding and prime.startswith(self._preceding))

    def reload(self) -> None:
        """Take over the sample that this or another process has recorded, or that it was dropped."""
        self._sample = self._recorded_sample() if self._sampling else None
        self._texts = [PrimingText(text) for text in self._sample.texts] if self._sample else []
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
        return samples_drawn_from(self._store.backend, documents, self._store.namespace)

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
            if not (self._preceding and document):
                yield self.priming_of(chunk)
            else:
                before = in_front.get(document, _NOTHING)
                yield self._preceding_of(chunk, before) or self.priming_of(chunk)
                in_front[document] = self._ended(np.concatenate([before, chunk]))[-self._num_tokens :]

    def priming_of(self, chunk: np.ndarray) -> Priming:
        """The first sampled texts that do not resemble the chunk; the bundled or given one if all do."""
        unlike = (text.token_ids for text in self._texts if not text.resembles(chunk))
        texts = tuple(islice(unlike, self._num_texts))
        return Priming(texts) if texts else self._fixed

    def _preceding_of(self, chunk: np.ndarray, before: np.ndarray) -> Priming | None:
        text = without_overlap(before, chunk)
        if len(text) < SHARED_RUN or PrimingText(text).resembles(chunk):
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
