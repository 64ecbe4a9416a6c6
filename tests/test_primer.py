from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_text
from contracts.kv import token_ids
from transformers import PreTrainedTokenizerFast

from rag_blend.chunk import NO_TOKENS
from rag_blend.likeness import without_overlap
from rag_blend.primer import Primer
from rag_blend.prompt import chunk_ids, chunk_separator
from rag_blend.sample import Priming, Sample, draw_sample
from rag_blend.storage import StorageBackend
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend
from rag_blend.store import KVStore

NUM_TOKENS = 64
CHUNKS = [token_ids(seed, 60) for seed in range(20)]
NOTHING = np.empty(0, dtype=np.int32)
DOCUMENTS = [f"doc {i // 2}" for i in range(20)]

MakePrimer = Callable[..., Primer]


@pytest.fixture
def backend() -> StorageBackend:
    return MemoryBackend()


@pytest.fixture
def make(backend: StorageBackend, tokenizer: PreTrainedTokenizerFast) -> MakePrimer:
    def make(choice: str = "sample", num_tokens: int = NUM_TOKENS, namespace: str = "tenant", **options: Any) -> Primer:
        num_texts = options.get("num_texts", 1)
        model = options.get("model", "model")
        store = KVStore(options.get("backend", backend), model, namespace, torch.float16)
        return Primer(choice, num_tokens, num_texts, False, tokenizer, store)

    return make


def shares_a_run(left: np.ndarray, right: np.ndarray, length: int = 16) -> bool:
    runs = {left[i : i + length].tobytes() for i in range(len(left) - length + 1)}
    return any(right[i : i + length].tobytes() in runs for i in range(len(right) - length + 1))


def text_for(primer: Primer, chunk: np.ndarray) -> np.ndarray:
    """The text that a chunk is primed with; the first of several."""
    texts = primer.priming_of(chunk).texts
    return texts[0] if texts else np.empty(0, dtype=np.int32)


def prime_of(*texts: np.ndarray) -> str:
    """What a chunk primed with these texts names as its priming."""
    return Priming(texts).digest


def draw(num_tokens: int = NUM_TOKENS, chunks: list[np.ndarray] = CHUNKS, documents: list[str] = DOCUMENTS) -> Sample:
    sample = draw_sample(chunks, documents, num_tokens, 2, NOTHING)
    assert sample is not None
    return sample


# --- which text ---


def test_none_primes_with_nothing(make: MakePrimer) -> None:
    for primer in (make("none"), make("sample", num_tokens=0)):
        primer.learn(CHUNKS, DOCUMENTS)
        assert text_for(primer, CHUNKS[0]).tolist() == []
        assert primer.accepts(NO_TOKENS)
        assert not primer.accepts(prime_of([1]))


def test_a_text_of_ones_own(make: MakePrimer, tokenizer: PreTrainedTokenizerFast, backend: StorageBackend) -> None:
    text = random_text(3, 200)
    primer = make(f"  {text}\n")
    primer.learn(CHUNKS, DOCUMENTS)
    ids = np.concatenate([chunk_ids(tokenizer, [text])[0], chunk_separator(tokenizer)])  # as in front of a chunk
    assert text_for(primer, CHUNKS[0]).tolist() == ids.tolist()
    assert text_for(primer, ids).tolist() == ids.tolist()  # there is no other
    assert primer.accepts(prime_of(ids))
    assert not primer.accepts(NO_TOKENS)


def test_until_there_is_a_sample_the_bundled_text_serves(make: MakePrimer) -> None:
    primer = make()
    text = text_for(primer, CHUNKS[0])
    assert len(text) == NUM_TOKENS
    assert primer.accepts(prime_of(text))
    assert not primer.accepts(NO_TOKENS)
    assert len(text_for(make(num_tokens=100), CHUNKS[0])) == 100


def test_a_chunk_is_not_primed_with_itself(make: MakePrimer) -> None:
    primer = make()
    bundled = text_for(primer, CHUNKS[0])
    primer.learn(CHUNKS, DOCUMENTS)
    texts = [text_for(primer, chunk) for chunk in CHUNKS]
    assert not any(shares_a_run(text, chunk) for text, chunk in zip(texts, CHUNKS, strict=True))
    assert {len(text) for text in texts} == {NUM_TOKENS}
    assert all(primer.accepts(prime_of(text)) for text in texts)
    first = text_for(primer, token_ids(99, 60))
    second = text_for(primer, first)
    third = text_for(primer, np.concatenate([first, second]))
    assert third.tolist() == bundled.tolist()
    assert len({prime_of(text) for text in (first, second, third)}) == 3
    assert text_for(primer, np.concatenate([first, second, third])).tolist() == bundled.tolist()


def test_a_short_overlap_is_allowed(make: MakePrimer) -> None:
    primer = make()
    primer.learn(CHUNKS, DOCUMENTS)
    first = text_for(primer, token_ids(99, 60))
    other = token_ids(98, 100)
    assert text_for(primer, np.concatenate([first[:15], other])).tolist() == first.tolist()
    assert text_for(primer, np.concatenate([first[:16], other])).tolist() != first.tolist()


def test_repetitive_passages_are_not_drawn() -> None:
    row = token_ids(1, 12)
    table = [np.concatenate([np.tile(row, 10), [i]]).astype(np.int32) for i in range(20)]
    assert draw_sample(table, [str(i) for i in range(20)], 32, 2, NOTHING) is None
    mixed = draw(NUM_TOKENS, [*table, *CHUNKS], [""] * 40)
    assert not any(shares_a_run(text, table[0]) for text in mixed.texts)


def test_what_was_primed_before_the_sample_stays_acceptable(make: MakePrimer) -> None:
    primer = make()
    bundled = text_for(primer, CHUNKS[0])
    primer.learn(CHUNKS, DOCUMENTS)
    assert primer.accepts(prime_of(bundled))
    assert not make("none").accepts(prime_of(bundled))


# --- the record ---


def test_the_sample_is_drawn_once_for_all(make: MakePrimer) -> None:
    first, second, late = make(), make(), make()
    first.learn(CHUNKS, DOCUMENTS)
    second.learn([token_ids(seed, 60) for seed in range(50, 70)], DOCUMENTS)  # loses: takes over the recorded one
    first.learn([token_ids(seed, 60) for seed in range(70, 90)], DOCUMENTS)
    chunk = token_ids(99, 60)
    assert prime_of(text_for(second, chunk)) == prime_of(text_for(first, chunk))
    assert text_for(late, chunk).tolist() != text_for(first, chunk).tolist()
    late.reload()
    assert prime_of(text_for(late, chunk)) == prime_of(text_for(first, chunk)) == prime_of(text_for(make(), chunk))


def test_lengths_and_tenants_have_samples_of_their_own(make: MakePrimer) -> None:
    make().learn(CHUNKS, DOCUMENTS)
    chunk = token_ids(99, 60)
    bundled = text_for(make(namespace="other"), chunk)
    assert prime_of(bundled) != prime_of(text_for(make(), chunk))
    other = make(num_tokens=NUM_TOKENS - 1)
    assert text_for(other, chunk).tolist() == bundled[1:].tolist()


def test_a_small_collection_gives_no_sample(make: MakePrimer) -> None:
    primer = make()
    bundled = prime_of(text_for(primer, CHUNKS[0]))
    primer.learn(CHUNKS[:8], DOCUMENTS[:8])
    assert prime_of(text_for(primer, CHUNKS[0])) == bundled
    primer.learn([], [])
    primer.learn(CHUNKS[:9], DOCUMENTS[:9])
    assert prime_of(text_for(primer, CHUNKS[10])) != bundled


def forget(primer: Primer, *documents: str) -> frozenset[str]:
    """Forget samples; returns the digests of their texts."""
    drawn = primer.drawn_from(set(documents))
    primer.drop(drawn)
    return drawn.primes


def test_forgetting_a_source_renews_the_sample(make: MakePrimer, tokenizer: PreTrainedTokenizerFast) -> None:
    primer = make()
    assert not primer.drawn_from({"doc 0"}).records
    bundled = prime_of(text_for(primer, CHUNKS[0]))
    primer.learn(CHUNKS, DOCUMENTS)
    sample = draw_sample(CHUNKS, DOCUMENTS, NUM_TOKENS, 2, chunk_separator(tokenizer))
    assert sample is not None and sample.documents < set(DOCUMENTS)
    old = [prime_of(text) for text in sample.texts]
    assert primer.accepts(old[0]) and primer.accepts(old[1])
    unused = set(DOCUMENTS) - sample.documents
    assert forget(primer, *unused) == frozenset()
    assert primer.accepts(old[0])
    assert forget(primer, *unused, min(sample.documents)) > set(old)
    assert not primer.accepts(old[0]) and not primer.accepts(old[1])
    assert primer.accepts(bundled)
    assert forget(primer, *DOCUMENTS) == frozenset()
    assert not make().accepts(old[0])
    rest = [(c, d) for c, d in zip(CHUNKS, DOCUMENTS, strict=True) if d != min(sample.documents)]
    primer.learn([c for c, _ in rest], [d for _, d in rest])
    assert not primer.accepts(old[0]) or not primer.accepts(old[1])
    assert prime_of(text_for(primer, token_ids(99, 60))) != bundled


@pytest.mark.parametrize(
    "by",
    [{"choice": "none"}, {"choice": "the river"}, {"num_tokens": 32}, {"model": "other"}, {"num_tokens": 0}],
    ids=str,
)
def test_whoever_forgets_finds_the_samples_of_all_models_and_lengths(
    make: MakePrimer, backend: StorageBackend, by: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    for options in ({}, {"num_tokens": 16}, {"model": "third"}):
        make(**options).learn(CHUNKS, DOCUMENTS)
    make(namespace="other tenant").learn(CHUNKS, DOCUMENTS)
    backend.put_record("a" * 64, b"[1, 2, 3]")  # a head
    assert len(list(backend.records())) == 5
    sample = draw_sample(CHUNKS, DOCUMENTS, 16, 2, chunk_separator(tokenizer))
    assert sample is not None
    assert forget(make(**by), min(sample.documents)) >= {prime_of(text) for text in sample.texts}
    assert len(list(backend.records())) == 2
    assert make(namespace="other tenant").drawn_from(sample.documents).records


def test_a_copy_without_a_document_does_not_hide_the_source() -> None:
    assert draw(NUM_TOKENS, CHUNKS * 2, [*DOCUMENTS, *[""] * 20]).documents


def test_another_process_does_not_go_on_with_a_forgotten_text(make: MakePrimer) -> None:
    first, second, third = make(), make(), make()
    first.learn(CHUNKS, DOCUMENTS)
    for other in (second, third):
        other.learn(CHUNKS, DOCUMENTS)
    old = forget(first, *DOCUMENTS)
    assert all(second.accepts(prime) for prime in old)  # it does not know yet
    second.learn([], [])
    third.reload()
    for other in (second, third):
        assert not any(other.accepts(prime) for prime in old)
        assert prime_of(text_for(other, CHUNKS[0])) not in old
    rest = [token_ids(seed, 60) for seed in range(50, 70)]
    first.learn(rest, [""] * 20)
    second.learn(CHUNKS, DOCUMENTS)
    assert prime_of(text_for(second, token_ids(99, 60))) == prime_of(text_for(first, token_ids(99, 60)))
    assert prime_of(text_for(second, token_ids(99, 60))) not in old


def test_a_record_that_cannot_be_read_for_a_moment_changes_nothing(
    make: MakePrimer, backend: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    primer = make()
    primer.learn(CHUNKS, DOCUMENTS)
    text = text_for(primer, token_ids(99, 60))

    def refuse(name: str) -> bytes | None:
        raise OSError("Input/output error")

    monkeypatch.setattr(backend, "get_record", refuse)
    primer.learn(CHUNKS, DOCUMENTS)
    primer.reload()
    assert text_for(primer, token_ids(99, 60)).tolist() == text.tolist()
    with pytest.raises(OSError):
        primer.drawn_from({"doc 0"})  # what cannot be read may be of this document


BROKEN = [
    b"", b"{", b"[]", b"null", b"7", b'{"texts": [[1]]}', b"\xff\xfe", b"[" * 100_000,
    b'{"kind": "prime-sample", "texts": 5, "digest": ""}',
    b'{"kind": "prime-sample", "namespace": "tenant", "texts": [[1]], "documents": ["a"], "digest": "0"}',
]  # fmt: skip


@pytest.mark.parametrize("data", BROKEN)
def test_a_damaged_record_is_replaced(make: MakePrimer, backend: StorageBackend, data: bytes) -> None:
    store = KVStore(backend, "model", "tenant", torch.float16)
    record = store.record_name("prime-sample", f"1 of {NUM_TOKENS}")
    with pytest.raises(ValueError):
        Sample.from_json(data, "tenant")
    backend.put_record(record, data)
    primer = make()
    assert len(text_for(primer, CHUNKS[0])) == NUM_TOKENS
    assert backend.get_record(record) is None
    primer.learn(CHUNKS, DOCUMENTS)
    assert Sample.from_json(backend.get_record(record) or b"", "tenant").documents


def test_one_changed_id_in_the_record_is_noticed() -> None:
    sample = draw()
    again = Sample.from_json(sample.to_json("tenant"), "tenant")
    assert [t.tolist() for t in again.texts] == [t.tolist() for t in sample.texts]
    assert {t.dtype for t in again.texts} == {np.dtype(np.int32)}
    assert again.documents == sample.documents
    with pytest.raises(ValueError, match="tenant"):
        Sample.from_json(sample.to_json("other"), "tenant")
    for change in ("texts", "documents", "namespace"):
        record = json.loads(sample.to_json("tenant"))
        if change == "texts":
            record["texts"][1][5] += 1
        elif change == "documents":
            record["documents"].pop()
        else:
            record["namespace"] = "other"
        with pytest.raises(ValueError, match="digest"):
            Sample.from_json(json.dumps(record).encode(), record["namespace"])


def test_a_record_that_cannot_be_read_is_no_obstacle(make: MakePrimer, backend: StorageBackend) -> None:
    class Unreadable(MemoryBackend):
        def get_record(self, name: str) -> bytes | None:
            raise PermissionError(name)

    primer = make(backend=Unreadable())
    assert len(text_for(primer, CHUNKS[0])) == NUM_TOKENS
    primer.learn(CHUNKS, DOCUMENTS)
    assert primer.accepts(prime_of(text_for(primer, CHUNKS[0])))


def test_the_sample_outlives_the_process(make: MakePrimer, tmp_path: Any) -> None:
    make(backend=DiskBackend(tmp_path)).learn(CHUNKS, DOCUMENTS)
    old, new = (make(backend=DiskBackend(tmp_path)) for _ in range(2))
    assert prime_of(text_for(old, CHUNKS[0])) != prime_of(text_for(make(), CHUNKS[0]))
    assert new.accepts(prime_of(text_for(old, CHUNKS[0])))


# --- several texts ---


@pytest.mark.parametrize("num_texts", [1, 2, 3])
def test_a_chunk_is_primed_with_several_texts_one_at_a_time(make: MakePrimer, num_texts: int) -> None:
    primer = make(num_texts=num_texts, num_tokens=16)
    primer.learn(CHUNKS, DOCUMENTS)
    head = token_ids(77, 10)
    for chunk in [*CHUNKS, token_ids(99, 60)]:
        priming = primer.priming_of(chunk)
        assert len(priming.texts) == num_texts
        assert not any(shares_a_run(text, chunk) for text in priming.texts)
        assert primer.accepts(priming.digest)
        contexts = priming.contexts(head)
        assert sum(context.weight for context in contexts) == pytest.approx(1.0)
        assert [c.token_ids.tolist() for c in contexts] == [
            *([*head.tolist(), *text.tolist()] for text in priming.texts), head.tolist()
        ]  # fmt: skip


def test_a_chunk_that_resembles_a_text_has_the_others(make: MakePrimer) -> None:
    primer = make(num_texts=2)
    primer.learn(CHUNKS, DOCUMENTS)
    first, second = primer.priming_of(token_ids(99, 60)).texts
    without_first = primer.priming_of(first)
    assert prime_of(without_first.texts[0]) == prime_of(second)
    assert len(without_first.texts) == 2
    without_two = primer.priming_of(np.concatenate([first, second]))
    assert len(without_two.texts) == 1 and primer.accepts(without_two.digest)
    assert len({p.digest for p in (without_first, without_two, primer.priming_of(token_ids(99, 60)))}) == 3


def test_forgetting_a_source_finds_every_choice_of_texts(make: MakePrimer) -> None:
    primer = make(num_texts=2)
    primer.learn(CHUNKS, DOCUMENTS)
    seen = {primer.priming_of(chunk).digest for chunk in CHUNKS}
    assert seen <= forget(primer, *DOCUMENTS)
    assert not any(primer.accepts(digest) for digest in seen)


def test_unprimed_chunks_have_one_context(make: MakePrimer) -> None:
    priming = make("none").priming_of(CHUNKS[0])
    assert priming.digest == NO_TOKENS
    assert [(c.token_ids.tolist(), c.weight) for c in priming.contexts(CHUNKS[1])] == [(CHUNKS[1].tolist(), 1.0)]


@pytest.mark.parametrize("options", [{"num_texts": 0}, {"num_tokens": -1}], ids=str)
def test_impossible_numbers_are_refused(make: MakePrimer, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        make(**options)


# --- preceding text ---


def primings(primer: Primer, chunks: list[np.ndarray], documents: list[str]) -> list[Priming]:
    return list(primer.primings_of(chunks, documents))


def test_a_chunk_is_primed_with_what_stands_in_front_of_it(
    make: MakePrimer, tokenizer: PreTrainedTokenizerFast
) -> None:
    primer = make("preceding", num_tokens=100)
    blank = chunk_separator(tokenizer).tolist()
    a, b, c, d = CHUNKS[:4]
    first, second, other, third = primings(primer, [a, b, d, c], ["doc", "doc", "another", "doc"])
    assert first == primer.priming_of(a) and other == primer.priming_of(d)  # nothing in front: as a sample would
    assert [text.tolist() for text in second.texts] == [[*a.tolist(), *blank]]
    assert [text.tolist() for text in third.texts] == [[*a.tolist(), *blank, *b.tolist(), *blank][-100:]]
    assert all(primer.accepts(priming.digest) for priming in (first, second, other, third))
    assert len({priming.digest for priming in (first, second, third)}) == 3


def test_chunks_without_a_document_have_nothing_in_front(make: MakePrimer) -> None:
    primer = make("preceding")
    assert primings(primer, CHUNKS[:3], ["", "", ""]) == [primer.priming_of(chunk) for chunk in CHUNKS[:3]]


def test_who_primes_otherwise_does_not_accept_preceding_text(make: MakePrimer) -> None:
    _, primed = primings(make("preceding"), CHUNKS[:2], ["doc"] * 2)
    for options in ({"choice": "sample"}, {"choice": "none"}, {"choice": "preceding", "num_tokens": NUM_TOKENS - 1}):
        assert not make(**options).accepts(primed.digest)
    assert make("preceding").accepts(primed.digest)


@pytest.mark.parametrize("edge", [0, 1], ids=["same ids", "another first id"])
def test_an_overlap_is_cut_off(make: MakePrimer, edge: int) -> None:
    before = token_ids(1, 40)
    chunk = np.concatenate([before[-12:], token_ids(2, 40)])
    chunk[0] += edge
    assert without_overlap(before, chunk).tolist() == before[:-12].tolist()
    (_, second) = primings(make("preceding"), [before, chunk], ["doc"] * 2)
    assert [text.tolist() for text in second.texts] == [before[:-12].tolist()]


def test_without_an_overlap_nothing_is_cut_off() -> None:
    assert without_overlap(CHUNKS[0], CHUNKS[1]).tolist() == CHUNKS[0].tolist()
    assert without_overlap(NOTHING, CHUNKS[1]).tolist() == []
    assert without_overlap(CHUNKS[0], CHUNKS[1][:5]).tolist() == CHUNKS[0].tolist()


def test_a_chunk_that_repeats_what_stands_in_front_is_primed_with_a_sample(make: MakePrimer) -> None:
    primer = make("preceding")
    chunk = np.concatenate([token_ids(3, 20), CHUNKS[0]])
    _, second = primings(primer, [CHUNKS[0], chunk], ["doc"] * 2)
    assert second == primer.priming_of(chunk)


# --- drawing ---


def test_the_draw_depends_on_contents_only() -> None:
    order = np.random.default_rng(0).permutation(20)
    first = draw()
    second = draw(NUM_TOKENS, [CHUNKS[i].copy() for i in order], [DOCUMENTS[i] for i in order])
    assert [t.tolist() for t in first.texts] == [t.tolist() for t in second.texts]
    assert first.documents == second.documents


def test_the_texts_come_from_several_passages_and_share_none() -> None:
    sample = draw()
    assert [len(text) for text in sample.texts] == [NUM_TOKENS] * 2
    used = [{i for i, chunk in enumerate(CHUNKS) if shares_a_run(text, chunk)} for text in sample.texts]
    assert [len(passages) for passages in used] == [4, 4]
    assert used[0].isdisjoint(used[1])
    assert sample.documents == {DOCUMENTS[i] for i in used[0] | used[1]}


def test_copies_count_once() -> None:
    assert draw_sample(CHUNKS[:1] * 50, ["a"] * 50, NUM_TOKENS, 2, NOTHING) is None


@pytest.mark.parametrize("num_passages", range(1, 10))
def test_few_long_passages(num_passages: int) -> None:
    """They are many tokens, but a text takes only a quarter from each."""
    chunks = [token_ids(seed, 8 * NUM_TOKENS) for seed in range(num_passages)]
    sample = draw_sample(chunks, [""] * num_passages, NUM_TOKENS, 2, NOTHING)
    assert (sample is not None) == (num_passages >= 8)
    if sample is not None:
        assert [len(text) for text in sample.texts] == [NUM_TOKENS] * 2
        assert sample.documents == frozenset()


def test_many_short_passages() -> None:
    chunks = [token_ids(seed, 5) for seed in range(200)] + [np.empty(0, dtype=np.int32)]
    sample = draw(NUM_TOKENS, chunks, ["d"] * 201)
    assert [len(text) for text in sample.texts] == [NUM_TOKENS] * 2


@pytest.mark.parametrize("kind", ["forms", "prose"])
def test_near_duplicates_are_not_primed_with_each_other(
    kind: str, make: MakePrimer, tokenizer: PreTrainedTokenizerFast
) -> None:
    """In a collection of forms every chunk resembles the sample, so the bundled text primes them; prose is sampled."""
    forms = [f"Item {i}: the red valve number {i * 7} opens under the old bridge in winter. " * 4 for i in range(40)]
    texts = forms if kind == "forms" else [random_text(seed, 80) for seed in range(40)]
    primer = make(num_tokens=32)
    bundled = text_for(primer, CHUNKS[0]).tolist()
    chunks = chunk_ids(tokenizer, texts)
    primer.learn(chunks, [str(i) for i in range(40)])
    with_bundled = [text_for(primer, chunk).tolist() == bundled for chunk in chunks]
    assert all(with_bundled) if kind == "forms" else not any(with_bundled)
