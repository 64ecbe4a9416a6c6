from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from contracts.kv import token_ids

from rag_blend.catalog import ChunkCatalog, Findings
from rag_blend.chunk import GENERIC_HEAD, NO_TOKENS, ChunkOrigin, chunk_key, digest_ids
from rag_blend.errors import StoreUnavailableError
from rag_blend.label import ListedChunk
from rag_blend.match import Match
from rag_blend.prompt import common_prefix

HEAD, OTHER_HEAD = token_ids(100, 12), token_ids(101, 12)
A, B, C = (token_ids(i, 40) for i in (1, 2, 3))
QUESTION = token_ids(200, 9)
HEAD_OF_20 = token_ids(102, 20)  # long enough to be found itself
NO_IDS = np.empty(0, dtype=np.int32)
PRIME = digest_ids([7, 7, 7])
NOTHING = Findings([], [], [], [])


class Shelf:
    """A catalog, and the chunks and heads it can ask for."""

    def __init__(self, any_head: bool = False) -> None:
        self.ids: dict[str, np.ndarray] = {}
        self.heads = {digest_ids(h): h for h in (HEAD, OTHER_HEAD, HEAD_OF_20, NO_IDS)}
        self.catalog = ChunkCatalog(self.ids.__getitem__, self.heads.__getitem__, any_head)

    def add(self, ids: np.ndarray, head: np.ndarray | str = HEAD, prime: str = NO_TOKENS) -> str:
        origin = ChunkOrigin("model", "tenant", head if isinstance(head, str) else digest_ids(head), prime)
        key = chunk_key(origin, ids)
        self.ids[key] = ids
        self.catalog.add(key, origin, ids)
        return key

    def find(self, *parts: np.ndarray) -> Findings:
        return self.catalog.find(np.concatenate(parts))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def places(matches: list[Match]) -> list[tuple[str, int, int, int]]:
    return [(m.key, m.start, m.length, m.offset) for m in matches]


def test_an_empty_catalog_finds_nothing(shelf: Shelf) -> None:
    assert shelf.find(HEAD, A) == NOTHING
    assert len(shelf.catalog) == 0


def test_a_plan_takes_as_exact_what_stays_so_and_is_stored_without_loss(shelf: Shelf) -> None:
    head, a, b = shelf.add(HEAD_OF_20, NO_TOKENS), shelf.add(A, HEAD_OF_20), shelf.add(B, HEAD_OF_20)
    found = shelf.find(HEAD_OF_20, A, B, QUESTION)
    assert [match.key for match in found.prefix] == [head, a]

    def planned(whole: list[Match], lossy: str = "") -> list[tuple[str, bool]]:
        segments = found.plan(20 + 40 + 40 + 9, whole, lambda key: key != lossy).segments
        return [(segment.key, segment.exact) for segment in segments]

    assert planned(found.prefix) == [(head, True), (a, True), (b, False)]
    assert planned(found.prefix, lossy=a) == [(head, True), (a, False), (b, False)]
    assert planned([]) == [(head, False), (a, False), (b, False)]
    assert planned(found.prefix[1:]) == [(a, True), (b, False)]  # a head with other angles would only spoil it


def test_directly_behind_its_head_a_chunk_is_exact(shelf: Shelf) -> None:
    a, b = shelf.add(A), shelf.add(B)
    found = shelf.find(HEAD, A, B, QUESTION)
    assert places(found.prefix) == [(a, 12, 40, 0)]
    assert places(found.chunks) == [(b, 52, 40, 0)]
    assert found.elsewhere == []


def test_in_second_place_it_is_not(shelf: Shelf) -> None:
    a = shelf.add(A)
    found = shelf.find(HEAD, QUESTION, A)
    assert found.prefix == []
    assert places(found.chunks) == [(a, 21, 40, 0)]


def test_the_beginning_of_a_chunk_is_exact_and_a_later_part_is_not(shelf: Shelf) -> None:
    a = shelf.add(A)
    found = shelf.find(HEAD, A[:31], QUESTION)
    assert places(found.prefix) == [(a, 12, 31, 0)]
    found = shelf.find(HEAD, A[9:], QUESTION)
    assert found.prefix == []
    assert places(found.chunks) == [(a, 12, 31, 9)]


def test_a_primed_chunk_is_never_exact(shelf: Shelf) -> None:
    a = shelf.add(A, prime=PRIME)
    found = shelf.find(HEAD, A, QUESTION)
    assert found.prefix == []
    assert places(found.chunks) == [(a, 12, 40, 0)]


def test_primed_and_unprimed_chunks_of_one_head_are_kept_apart(shelf: Shelf) -> None:
    shelf.add(A, prime=PRIME)
    b = shelf.add(B)
    found = shelf.find(HEAD, B, A)
    assert places(found.prefix) == [(b, 12, 40, 0)]
    assert len(found.chunks) == 1


def test_behind_another_head_it_is_elsewhere(shelf: Shelf) -> None:
    a = shelf.add(A)
    for start in (OTHER_HEAD, QUESTION, np.empty(0, dtype=np.int32)):
        found = shelf.find(start, A)
        assert found.prefix == found.chunks == []
        assert places(found.elsewhere) == [(a, len(start), 40, 0)]


@pytest.mark.parametrize("changed", [1, 2, 3, 4])
def test_up_to_three_ids_may_change_at_the_end_of_the_head(shelf: Shelf, changed: int) -> None:
    a = shelf.add(A)
    start = HEAD.copy()
    start[-changed] = 499 if start[-changed] != 499 else 498
    found = shelf.find(start, A)
    assert found.prefix == []  # exact only behind the very same tokens
    assert places(found.chunks) == ([(a, 12, 40, 0)] if changed <= 3 else [])
    assert len(found.elsewhere) == (changed > 3)


@pytest.mark.parametrize("missing", [3, 4])
def test_up_to_three_ids_may_be_missing_at_the_end_of_the_head(shelf: Shelf, missing: int) -> None:
    shelf.add(A)
    found = shelf.find(HEAD[:-missing], A)
    assert found.prefix == []
    assert bool(found.chunks) == (missing == 3)


def test_a_longer_head_with_the_same_beginning_suits_but_is_not_exact(shelf: Shelf) -> None:
    a = shelf.add(A)
    found = shelf.find(HEAD, QUESTION[:1], A)
    assert found.prefix == []
    assert places(found.chunks) == [(a, 13, 40, 0)]


def test_at_its_place_but_behind_other_tokens_it_is_not_exact(shelf: Shelf) -> None:
    shelf.add(A)
    start = HEAD.copy()
    start[-1] += 1
    assert shelf.find(start, A).prefix == []


def test_any_head_blends_but_never_calls_it_exact() -> None:
    shelf = Shelf(any_head=True)
    a = shelf.add(A)
    found = shelf.find(OTHER_HEAD, A)
    assert found.prefix == found.elsewhere == []
    assert places(found.chunks) == [(a, 12, 40, 0)]
    assert places(shelf.find(HEAD, A).prefix) == [(a, 12, 40, 0)]


def test_a_generic_head_suits_every_prompt_and_is_never_exact(shelf: Shelf) -> None:
    a = shelf.add(A, head=GENERIC_HEAD)
    for start in (HEAD, OTHER_HEAD, np.empty(0, dtype=np.int32)):
        found = shelf.find(start, A, QUESTION)
        assert found.prefix == found.elsewhere == []
        assert places(found.chunks) == [(a, len(start), 40, 0)]


def test_the_head_itself_is_exact_at_the_start_of_the_prompt(shelf: Shelf) -> None:
    head = token_ids(300, 40)
    shelf.heads[digest_ids(head)] = head
    own, a = shelf.add(head, head=NO_TOKENS), shelf.add(A, head=head)
    found = shelf.find(head, A, QUESTION)
    assert places(found.prefix) == [(own, 0, 40, 0), (a, 40, 40, 0)]
    assert shelf.find(QUESTION, head).prefix == []


@pytest.mark.parametrize("any_head", [False, True])
def test_a_head_is_not_blended_into_prompts_that_begin_otherwise(any_head: bool) -> None:
    shelf = Shelf(any_head)
    shelf.add(HEAD_OF_20, NO_TOKENS)
    assert shelf.find(HEAD, HEAD_OF_20, QUESTION) == NOTHING
    changed = np.concatenate([[HEAD_OF_20[0] + 1], HEAD_OF_20[1:]]).astype(np.int32)
    assert shelf.find(changed, A, QUESTION) == NOTHING


def test_the_same_text_behind_its_own_head_is_preferred(shelf: Shelf) -> None:
    generic = shelf.add(A, head=GENERIC_HEAD)
    own = shelf.add(A, prime=PRIME)
    found = shelf.find(HEAD, QUESTION, A)
    assert [m.key for m in found.chunks] == [own, generic]
    assert [m.key for m in shelf.find(OTHER_HEAD, A).chunks] == [generic]


def test_longer_matches_come_first(shelf: Shelf) -> None:
    keys = [shelf.add(A), shelf.add(B[:20]), shelf.add(C[:30])]
    found = shelf.find(HEAD, QUESTION, B[:20], C[:30], A)
    assert [m.key for m in found.chunks] == [keys[0], keys[2], keys[1]]


def test_elsewhere_counts_a_place_once_and_not_what_is_used(shelf: Shelf) -> None:
    a = shelf.add(A)
    shelf.add(A, head=OTHER_HEAD)
    shelf.add(B, head=OTHER_HEAD)
    found = shelf.find(HEAD, A, QUESTION)
    assert places(found.prefix) == [(a, 12, 40, 0)]
    assert found.elsewhere == []  # it is stored for another head as well, but that is no miss
    assert [m.start for m in shelf.find(HEAD, A, B).elsewhere] == [52]
    assert len(shelf.find(QUESTION, A).elsewhere) == 1


def test_a_removed_chunk_is_not_found(shelf: Shelf) -> None:
    a, b, c = shelf.add(A), shelf.add(B, head=OTHER_HEAD), shelf.add(C, prime=PRIME)
    assert len(shelf.catalog) == 3
    shelf.catalog.remove([b, "0" * 64, "no key"])
    assert len(shelf.catalog) == 2
    assert shelf.find(HEAD, B) == NOTHING
    shelf.catalog.remove([a, c])
    assert len(shelf.catalog) == 0
    shelf.add(A)
    assert len(shelf.find(HEAD, A).prefix) == 1


def test_adding_twice_is_adding_once(shelf: Shelf) -> None:
    shelf.add(A)
    shelf.add(A)
    assert len(shelf.catalog) == 1
    assert len(shelf.find(HEAD, A).prefix) == 1


def test_adding_many_at_once_is_adding_one_by_one() -> None:
    one, many = Shelf(), Shelf()
    chunks = []
    for number in range(60):
        ids = token_ids(number % 40, 40)  # the last third is there already, or primed otherwise
        head = (digest_ids(HEAD), digest_ids(OTHER_HEAD), GENERIC_HEAD, "f" * 64)[number % 4]
        origin = ChunkOrigin("model", "tenant", head, PRIME if number % 3 else NO_TOKENS)
        chunks.append(ListedChunk(chunk_key(origin, ids), origin, ids))
        for shelf in (one, many):
            shelf.ids[chunks[-1].key] = ids
    for chunk in chunks:
        one.catalog.add(*chunk)
    many.catalog.add_all(iter(chunks))
    known = {chunk.key for chunk in chunks if chunk.origin.head != "f" * 64}
    assert len(many.catalog) == len(one.catalog) == len(known) < 45
    for head in (HEAD, OTHER_HEAD):
        parts = [head, *(chunk.token_ids for chunk in chunks[:12]), QUESTION]
        assert many.find(*parts) == one.find(*parts)
        assert many.find(*parts).chunks and many.find(*parts).elsewhere


def test_a_chunk_whose_head_is_unknown_is_left_out(shelf: Shelf) -> None:
    shelf.add(A, head="f" * 64)
    assert len(shelf.catalog) == 0


def test_a_chunk_whose_head_is_not_what_its_digest_says_is_left_out(shelf: Shelf) -> None:
    shelf.heads[digest_ids(HEAD)] = OTHER_HEAD  # a damaged record
    shelf.add(A)
    assert len(shelf.catalog) == 0
    assert shelf.find(OTHER_HEAD, A) == NOTHING


def test_an_unknown_head_is_named_once(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    for text in (A, B, C):
        shelf.add(text, head="f" * 64)
        shelf.add(text, head="e" * 64)
        shelf.add(text)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
    assert "ffffffffffff" in caplog.text and "ingest again" in caplog.text
    assert len(shelf.catalog) == 3


def test_a_repaired_head_is_used_and_missed_again_when_it_is_damaged_again(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    head = token_ids(300, 12)
    shelf.add(A, head=head)
    shelf.heads[digest_ids(head)] = head
    shelf.add(A, head=head)
    assert len(shelf.find(head, A).prefix) == 1
    shelf.catalog.clear()
    assert len(shelf.catalog) == 0 and shelf.find(head, A) == NOTHING
    del shelf.heads[digest_ids(head)]
    shelf.add(A, head=head)
    assert len(caplog.records) == 2


def test_a_chunk_that_vanished_is_reported_once(shelf: Shelf) -> None:
    a, b, c = shelf.add(A), shelf.add(B), shelf.add(C)
    del shelf.ids[a], shelf.ids[c]
    found = shelf.find(HEAD, A, B, A, QUESTION)
    assert found.lost == [a]
    assert [m.key for m in found.chunks] == [b]
    assert len(shelf.catalog) == 2  # the other one has not been missed yet
    found = shelf.find(HEAD, A, B, A, QUESTION)
    assert found.lost == [] and [m.key for m in found.chunks] == [b]
    assert shelf.find(HEAD, C).lost == [c]
    assert shelf.find(HEAD, C) == NOTHING


def test_vanished_chunks_of_every_group_are_reported(shelf: Shelf) -> None:
    keys = [shelf.add(A), shelf.add(A, prime=PRIME), shelf.add(A, head=OTHER_HEAD), shelf.add(A, head=GENERIC_HEAD)]
    for key in keys:
        del shelf.ids[key]
    assert sorted(shelf.find(HEAD, A).lost) == sorted(keys)
    assert len(shelf.catalog) == 0


def test_however_many_have_vanished_the_next_search_is_clean(shelf: Shelf) -> None:
    texts = [token_ids(seed, 20) for seed in range(1000, 1700)]
    keys = [shelf.add(text) for text in texts]
    shelf.ids.clear()
    assert sorted(shelf.find(HEAD, *texts).lost) == sorted(keys)
    assert shelf.find(HEAD, *texts) == NOTHING


def test_a_damaged_middle_gives_an_exact_part_and_a_blended_one(shelf: Shelf) -> None:
    long = token_ids(5, 80)
    key = shelf.add(long)
    torn = long.copy()
    torn[39] += 1
    found = shelf.find(HEAD, torn)
    assert places(found.prefix) == [(key, 12, 39, 0)]
    assert places(found.chunks) == [(key, 52, 40, 40)]


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([2], [1], 0)],
)
def test_common_prefix(left: list[int], right: list[int], length: int) -> None:
    arrays: Callable[[list[int]], np.ndarray] = lambda ids: np.asarray(ids, dtype=np.int32)  # noqa: E731
    assert common_prefix(arrays(left), arrays(right)) == common_prefix(arrays(right), arrays(left)) == length


def test_chunks_are_read_ahead_and_what_cannot_be_had_is_not_asked_for_again() -> None:
    """A way to the medium for each of them in turn would add up."""
    errors: dict[str, Exception] = {}
    ahead: list[set[str]] = []
    shelf = Shelf()

    def read_ahead(keys: Sequence[str]) -> dict[str, Exception]:
        ahead.append(set(keys))
        return {key: error for key, error in errors.items() if key in keys}

    def ids_of(key: str) -> np.ndarray:
        assert key not in errors
        return shelf.ids[key]

    shelf.catalog = ChunkCatalog(ids_of, shelf.heads.__getitem__, read_ahead=read_ahead)
    a, b, c = shelf.add(A), shelf.add(B), shelf.add(C)
    assert not shelf.find(HEAD, A, B, C, QUESTION).lost
    assert ahead == [{a, b, c}]
    errors.update({a: StoreUnavailableError("silent"), b: KeyError(b)})
    found = shelf.find(HEAD, A, B, C, QUESTION)
    assert sorted(found.lost) == sorted([a, b])
    assert ahead[1:] == [{a, b, c}, {c}]  # once more without what is gone; what is silent need not be asked again
    errors.clear()
    assert not shelf.find(HEAD, A, B, C, QUESTION).lost
    assert ahead[-1] == {a, c}  # b is forgotten


def test_a_chunk_that_was_seen_to_be_gone_and_is_stored_again_is_found(shelf: Shelf) -> None:
    """A look in advance forgets nothing; what is added behind it must not be forgotten for it."""
    a = shelf.add(A)
    del shelf.ids[a]
    assert shelf.catalog.keys_in(A) == set()
    shelf.add(A)
    assert shelf.catalog.keys_in(A) == {a}
    found = shelf.find(HEAD, A, QUESTION)
    assert [match.key for match in found.prefix] == [a] and not found.lost
