"""`rag_blend.match`: chunks are found wherever they stand, and nothing that is not there is found."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_blend.match import ChunkIndex, Match

Ids = npt.NDArray[np.int32]

WINDOW = 16
VOCABULARY = 50_000
# Ids that stand in no chunk: glue, questions, edges that tokenised differently.
FRESH = 1_000_000


def key_of(number: int) -> str:
    return f"{number:064x}"


class Library:
    """Chunks with an index over them; counts how often the index asks for ids."""

    def __init__(self, chunks: Iterable[Ids] = ()) -> None:
        self.ids: dict[str, Ids] = {}
        self.calls: list[str] = []
        self.index = ChunkIndex(self.token_ids_of, WINDOW)
        for number, ids in enumerate(chunks):
            self.add(key_of(number), ids)

    def token_ids_of(self, key: str) -> Ids:
        self.calls.append(key)
        return self.ids[key]

    def add(self, key: str, ids: Ids) -> None:
        self.ids[key] = ids
        self.index.add(key, ids)

    def match(self, *parts: npt.ArrayLike) -> list[Match]:
        """Match a prompt made of parts; every result is checked against the definition."""
        prompt = np.concatenate([np.asarray(part, np.int64) for part in parts])
        matches = self.index.match(prompt)
        check(matches, prompt, self.ids)
        return matches


def check(matches: list[Match], prompt: npt.NDArray[np.int64], ids: dict[str, Ids]) -> None:
    """Equal ids, no overlaps, sorted, long enough, as far as they can reach."""
    end = 0
    for match in matches:
        chunk = ids[match.key]
        assert match.start >= end
        assert match.length >= WINDOW
        assert match.chunk_tokens == len(chunk)
        assert 0 <= match.offset <= match.offset + match.length <= len(chunk)
        assert match.end == match.start + match.length <= len(prompt)
        assert match.edge_tokens == len(chunk) - match.length
        stretch = chunk[match.offset : match.offset + match.length]
        np.testing.assert_array_equal(prompt[match.start : match.end], stretch)
        end = match.end


def random_chunks(count: int, tokens: int, seed: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, VOCABULARY, (count, tokens), dtype=np.int32))


def glue(tokens: int, seed: int = 1) -> Ids:
    return np.random.default_rng(seed).integers(FRESH, 2 * FRESH, tokens, dtype=np.int32)


def spans(matches: list[Match]) -> list[tuple[str, int, int, int]]:
    return [(match.key, match.start, match.length, match.offset) for match in matches]


# --- where a chunk can stand --------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 7, 16, 333])
def test_whole_chunk_at_any_position(position: int) -> None:
    library = Library(random_chunks(20, 200))
    (match,) = library.match(glue(position), library.ids[key_of(7)], glue(41))
    assert match == Match(key=key_of(7), start=position, length=200, offset=0, chunk_tokens=200)
    assert (match.end, match.edge_tokens) == (position + 200, 0)


def test_several_chunks_in_prompt_order() -> None:
    library = Library(random_chunks(20, 200))
    parts = [part for number in (9, 3, 15) for part in (glue(5), library.ids[key_of(number)])]
    assert spans(library.match(*parts)) == [
        (key_of(9), 5, 200, 0),
        (key_of(3), 210, 200, 0),
        (key_of(15), 415, 200, 0),
    ]


def test_adjacent_chunks() -> None:
    library = Library(random_chunks(20, 200))
    parts = [library.ids[key_of(number)] for number in (4, 5, 11)]
    assert spans(library.match(*parts)) == [
        (key_of(4), 0, 200, 0),
        (key_of(5), 200, 200, 0),
        (key_of(11), 400, 200, 0),
    ]


def test_chunk_repeated_in_the_prompt() -> None:
    library = Library(random_chunks(5, 100))
    chunk = library.ids[key_of(2)]
    matches = library.match(chunk, glue(3), chunk, chunk)
    assert spans(matches) == [(key_of(2), start, 100, 0) for start in (0, 103, 203)]
    assert library.calls == [key_of(2)]


@pytest.mark.parametrize("tokens", [16, 17, 31, 32, 40, 63, 64, 65, 100, 1000])
def test_chunk_of_any_length_alone(tokens: int) -> None:
    library = Library(random_chunks(3, tokens))
    (match,) = library.match(library.ids[key_of(1)])
    assert (match.key, match.length, match.edge_tokens) == (key_of(1), tokens, 0)


@pytest.mark.parametrize(("first", "last"), [(0, 90), (60, 130), (110, 200), (0, 31), (80, 111), (184, 200)])
def test_cut_chunk(first: int, last: int) -> None:
    library = Library(random_chunks(20, 200))
    (match,) = library.match(glue(10), library.ids[key_of(7)][first:last], glue(10))
    assert spans([match]) == [(key_of(7), 10, last - first, first)]
    assert match.edge_tokens == 200 - (last - first)


@pytest.mark.parametrize(("tokens", "part"), [(31, 16), (32, 19), (63, 19), (64, 31), (200, 31)])
def test_shortest_part_that_is_always_found(tokens: int, part: int) -> None:
    library = Library(random_chunks(3, tokens))
    for first in range(tokens - part + 1):
        matches = library.match(glue(5), library.ids[key_of(1)][first : first + part], glue(5))
        assert spans(matches) == [(key_of(1), 5, part, first)]


@pytest.mark.parametrize("tokens", [18, 20, 25, 31, 33, 48, 63, 64, 70, 300])
def test_first_and_last_token_changed(tokens: int) -> None:
    library = Library(random_chunks(20, tokens))
    changed = library.ids[key_of(7)].copy()
    changed[[0, -1]] = FRESH
    (match,) = library.match(glue(9), changed, glue(9))
    assert spans([match]) == [(key_of(7), 10, tokens - 2, 1)]
    assert match.edge_tokens == 2


@pytest.mark.parametrize(("front", "back"), [(3, 0), (0, 3), (1, 2), (3, 3)])
@pytest.mark.parametrize("tokens", [22, 40, 64, 213])
def test_up_to_three_tokens_changed_at_each_edge(tokens: int, front: int, back: int) -> None:
    library = Library(random_chunks(20, tokens))
    inner = library.ids[key_of(3)][front : tokens - back]
    (match,) = library.match(glue(20), inner, glue(20, seed=2))
    assert spans([match]) == [(key_of(3), 20, tokens - front - back, front)]


def test_token_changed_inside_gives_two_matches() -> None:
    library = Library(random_chunks(5, 200))
    changed = library.ids[key_of(2)].copy()
    changed[90] = FRESH
    assert spans(library.match(glue(4), changed)) == [(key_of(2), 4, 90, 0), (key_of(2), 95, 109, 91)]


# --- chunks that compete ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [1, 20, 50, 69, 80, 84])
def test_overlapping_chunks_are_trimmed(overlap: int) -> None:
    """Chunks cut from one document share text: one is whole, the other gives way."""
    document = random_chunks(1, 200 - overlap)[0]
    library = Library([document[:100], document[100 - overlap :]])
    matches = library.match(glue(3), document, glue(3))
    assert {match.key for match in matches} == {key_of(0), key_of(1)}
    assert sorted(match.length for match in matches) == [100 - overlap, 100]


def test_remainder_shorter_than_window_is_dropped() -> None:
    document = random_chunks(1, 115)[0]
    library = Library([document[:100], document[15:]])
    (match,) = library.match(document)
    assert match.length == 100


def test_remainder_between_two_matches() -> None:
    """A chunk whose two ends belong to better matches keeps its middle, here without one free fingerprint."""
    document = random_chunks(1, 220)[0]
    library = Library([document[:100], document[120:], document[65:155]])
    assert spans(library.match(document)) == [
        (key_of(0), 0, 100, 0),
        (key_of(2), 100, 20, 35),
        (key_of(1), 120, 100, 0),
    ]


def test_longer_support_wins() -> None:
    long, short = random_chunks(2, 300)
    library = Library([long, long[:150], short])
    assert spans(library.match(glue(2), long, glue(2))) == [(key_of(0), 2, 300, 0)]


@pytest.mark.parametrize("head", [20, 40, 64, 150, 160])
def test_whole_chunk_beats_the_head_of_a_longer_one(head: int) -> None:
    """Both cover the same tokens; the shorter chunk is matched whole."""
    (long,) = random_chunks(1, 300)
    library = Library([long, long[:head]])
    assert spans(library.match(glue(2), long[:head], glue(2))) == [(key_of(1), 2, head, 0)]


@pytest.mark.parametrize("shared", [64, 400])
def test_boilerplate_in_every_chunk(shared: int) -> None:
    """Far more chunks than places tried for a window begin alike; the right one is still found, and whole."""
    chunks = random_chunks(300, 500)
    for chunk in chunks:
        chunk[:shared] = chunks[0][:shared]
    library = Library(chunks)
    prompt = [glue(7), chunks[250], glue(7), chunks[299], glue(7), chunks[3]]
    assert [match.key for match in library.match(*prompt)] == [key_of(n) for n in (250, 299, 3)]
    assert all(match.edge_tokens == 0 for match in library.match(*prompt))
    assert len(library.calls) == 6


def test_same_ids_under_many_keys() -> None:
    (ids,) = random_chunks(1, 120)
    library = Library([ids] * 50)
    (match,) = library.match(glue(4), ids, glue(4))
    assert (match.start, match.length) == (4, 120)
    assert len(library.calls) == 1


def test_boilerplate_of_removed_chunks_does_not_hide_the_living() -> None:
    """As when documents are refreshed: the removed ones were first in line for their common windows."""
    (ids,) = random_chunks(1, 120)
    others = random_chunks(2000, 40, seed=3)
    library = Library([ids] * 60 + others)
    library.match(ids)
    for number in range(59):
        library.index.remove(key_of(number))
    assert [match.key for match in library.match(ids)] == [key_of(59)]


# --- periodic text: bounded work ----------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 7])
def test_periodic_text_costs_few_calls(period: int) -> None:
    pattern = np.arange(period, dtype=np.int32)
    library = Library([np.resize(pattern, 100 + number) for number in range(80)])
    matches = library.match(np.resize(pattern, 4000))
    # All but what is shorter than a window between two matches is covered.
    assert sum(match.length for match in matches) > 4000 - WINDOW * (len(matches) + 1)
    assert len(matches) <= 4000 // WINDOW
    assert len(library.calls) <= 80


def test_one_repeated_token_is_tiled_with_whole_chunks() -> None:
    library = Library([np.zeros(128, np.int32)])
    matches = library.match(np.zeros(1280, np.int32))
    assert spans(matches) == [(key_of(0), start, 128, 0) for start in range(0, 1280, 128)]
    assert len(library.calls) == 1


def test_vanished_entries_cost_a_bounded_number_of_calls() -> None:
    """A wiped store behind a full index: one question for each candidate, and no end without a limit."""
    chunks = random_chunks(2000, 32)
    library = Library(chunks)
    library.ids.clear()
    assert library.index.match(np.concatenate(chunks)) == []
    assert 0 < len(library.calls) <= 512
    assert len(set(library.calls)) == len(library.calls)


def test_places_tried_for_a_common_window_are_capped() -> None:
    (ids,) = random_chunks(1, 120)
    library = Library([ids] * 500)
    library.match(ids)
    for number in range(500, 600):  # these come into an array of their own
        library.add(key_of(number), ids)
    library.ids.clear()
    library.calls.clear()
    assert library.index.match(ids) == []
    assert len(library.calls) == 16


# --- the callback -------------------------------------------------------------------------------------


def test_vanished_entry_is_skipped_and_the_next_candidate_taken() -> None:
    (ids,) = random_chunks(1, 200)
    library = Library([ids, ids[:150], random_chunks(1, 80, seed=9)[0]])
    del library.ids[key_of(0)]
    matches = library.match(glue(3), ids, library.ids[key_of(2)])
    assert spans(matches) == [(key_of(1), 3, 150, 0), (key_of(2), 203, 80, 0)]


def test_replaced_entry_is_never_a_wrong_match() -> None:
    ids, other = random_chunks(2, 200)
    library = Library([ids])
    library.ids[key_of(0)] = other
    assert library.match(glue(3), ids) == []
    library.ids[key_of(0)] = ids[:100]
    assert library.index.match(ids) == []


def test_other_errors_of_the_callback_pass_through() -> None:
    def broken(key: str) -> Ids:
        raise OSError("disk on fire")

    (ids,) = random_chunks(1, 100)
    index = ChunkIndex(broken)
    index.add(key_of(0), ids)
    with pytest.raises(OSError, match="disk on fire"):
        index.match(ids)


def test_callback_may_change_the_index() -> None:
    first, second = random_chunks(2, 100)
    library = Library([first, second])

    def forgetful(key: str) -> Ids:
        index.remove(key)
        return library.ids[key]

    index = ChunkIndex(forgetful)
    index.add(key_of(0), first)
    index.add(key_of(1), second)
    assert len(index.match(np.concatenate([first, second]))) == 2
    assert len(index) == 0


def test_nothing_is_asked_for_a_foreign_prompt() -> None:
    library = Library(random_chunks(100, 200))
    assert library.match(glue(3000)) == []
    assert library.calls == []


# --- adding and removing ------------------------------------------------------------------------------


def test_empty_index_and_short_prompts() -> None:
    library = Library()
    assert library.match(glue(100)) == []
    library.add(key_of(0), random_chunks(1, 100)[0])
    assert library.index.match([]) == []
    assert library.index.match(library.ids[key_of(0)][: WINDOW - 1]) == []
    assert len(library.index.match(library.ids[key_of(0)][:WINDOW])) == 1


def test_chunk_shorter_than_window_is_held_but_never_matched() -> None:
    library = Library([*random_chunks(1, WINDOW - 1), np.empty(0, np.int32)])
    assert len(library.index) == 2
    assert key_of(0) in library.index
    assert library.match(library.ids[key_of(0)], glue(30)) == []


def test_adding_a_key_again_changes_nothing() -> None:
    first, second = random_chunks(2, 100)
    library = Library([first])
    library.index.add(key_of(0), first)
    library.index.add(key_of(0), second)
    assert len(library.index) == 1
    assert library.match(second) == []
    assert len(library.match(first)) == 1


def test_remove_and_add_again() -> None:
    library = Library(random_chunks(10, 100))
    chunk = library.ids[key_of(4)]
    assert len(library.match(chunk)) == 1
    library.index.remove(key_of(4))
    library.index.remove(key_of(4))
    library.index.remove(key_of(99))
    library.index.remove("not a key")
    assert key_of(4) not in library.index
    assert len(library.index) == 9
    assert library.match(chunk) == []
    library.index.add(key_of(4), chunk)
    assert key_of(4) in library.index
    assert [match.key for match in library.match(chunk)] == [key_of(4)]


def test_add_and_remove_interleaved_with_match() -> None:
    """A thousand random steps; after each the index knows exactly the chunks a dict knows."""
    rng = np.random.default_rng(5)
    chunks = [ids[: rng.integers(16, 120)] for ids in random_chunks(150, 120)]
    library = Library()
    held: set[int] = set()
    for step in range(1000):
        number = int(rng.integers(len(chunks)))
        # Growing and shrinking phases, so that merges and compactions both happen.
        if rng.random() < (0.8 if step // 200 % 2 == 0 else 0.2):
            library.add(key_of(number), chunks[number])
            held.add(number)
        else:
            library.index.remove(key_of(number))
            held.discard(number)
        assert len(library.index) == len(held)
        if step % 5 == 0:
            shown = rng.choice(len(chunks), 6, replace=False).tolist()
            parts = [part for i in shown for part in (glue(2), chunks[i])]
            expected = [(key_of(i), len(chunks[i])) for i in shown if i in held]
            assert [(match.key, match.length) for match in library.match(*parts)] == expected
    assert [key_of(i) in library.index for i in range(150)] == [i in held for i in range(150)]


def test_keys_must_be_64_hex_digits() -> None:
    index = ChunkIndex(lambda key: np.empty(0, np.int32))
    for key in ("", "ab", "g" * 64, "A" * 64, "0" * 63, "0" * 66, " " + "0" * 64):
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            index.add(key, [1, 2, 3])
        assert key not in index
    assert 3 not in index


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**70], [0.5], [[1, 2], [3, 4]], [[]], 5, ["a"]])
def test_ids_must_be_flat_integers_in_range(ids: npt.ArrayLike) -> None:
    index = ChunkIndex(lambda key: np.empty(0, np.int32))
    with pytest.raises(ValueError, match="token ids must"):
        index.add(key_of(0), ids)
    with pytest.raises(ValueError, match="token ids must"):
        index.match(ids)
    assert len(index) == 0


def test_largest_ids_and_any_integer_type() -> None:
    ids = np.arange(2**31 - 100, 2**31, dtype=np.int64)
    index = ChunkIndex(lambda key: ids.astype(np.int32))
    index.add(key_of(0), ids.tolist())
    for prompt in (ids.tolist(), ids, ids.astype(np.uint32), ids.astype(np.int32)):
        assert [match.length for match in index.match(prompt)] == [100]


@pytest.mark.parametrize("window", [1, 2, 5, 32])
def test_other_windows(window: int) -> None:
    chunks = random_chunks(30, 100)
    index = ChunkIndex(lambda key: chunks[int(key, 16)], window)
    for number, ids in enumerate(chunks):
        index.add(key_of(number), ids)
    matches = index.match(np.concatenate([glue(3), chunks[8], glue(3), chunks[9][:window]]))
    assert spans(matches)[0] == (key_of(8), 3, 100, 0)
    assert matches[-1].length == window


def test_window_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ChunkIndex(lambda key: np.empty(0, np.int32), window=0)


def test_threads_may_add_remove_and_match_at_once() -> None:
    chunks = random_chunks(400, 64)
    library = Library(chunks[:100])
    library.ids.update({key_of(number): ids for number, ids in enumerate(chunks)})
    prompt = np.concatenate(chunks[:50])
    failures: list[BaseException] = []

    def churn(first: int) -> None:
        try:
            for number in range(first, first + 100):
                library.index.add(key_of(number), chunks[number])
            for number in range(first, first + 100):
                library.index.remove(key_of(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(library.index.match(prompt)) == 50
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(library.index) == 100
    assert len(library.index.match(prompt)) == 50


# --- many at once -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 40), max_size=120),
    removed=st.sets(st.integers(0, 40)),
    at_once=st.integers(1, 50),
    window=st.sampled_from([1, 3, WINDOW]),
    seed=st.integers(0, 2**32 - 1),
)
def test_adding_many_at_once_is_adding_one_by_one(
    numbers: list[int], removed: set[int], at_once: int, window: int, seed: int
) -> None:
    """The same matches with the same keys, whatever was there before, in batches of whatever size."""
    rng = np.random.default_rng(seed)
    document = rng.integers(0, 300, 400, dtype=np.int32)  # chunks overlap, and boilerplate is common
    chunks = [document[start : start + size] for start, size in rng.integers(0, 200, (41, 2))]
    one, many = (ChunkIndex(lambda key: chunks[int(key, 16)], window) for _ in range(2))
    for first in range(0, len(numbers), at_once):
        some = numbers[first : first + at_once]
        for number in some:
            one.add(key_of(number), chunks[number])
        many.add_all((key_of(number), chunks[number]) for number in some)
        for index in (one, many):
            for number in removed:
                index.remove(key_of(number))
    assert len(one) == len(many) == len(set(numbers) - removed)
    prompt = np.concatenate([document[:150], glue(3), *(chunks[number] for number in numbers[:6])])
    assert many.match(prompt) == one.match(prompt)
    assert [key_of(number) in many for number in range(41)] == [key_of(number) in one for number in range(41)]


def test_more_than_fit_into_one_pass() -> None:
    chunks = random_chunks(2500, 40)
    one, many = (ChunkIndex(lambda key: chunks[int(key, 16)]) for _ in range(2))
    for number, ids in enumerate(chunks):
        one.add(key_of(number), ids)
    many.add_all((key_of(number), ids) for number, ids in enumerate(chunks))
    prompt = np.concatenate([chunks[number] for number in (0, 1023, 1024, 2047, 2048, 2499)])
    assert many.match(prompt) == one.match(prompt)
    assert len(many.match(prompt)) == 6 and len(many) == 2500


def test_of_two_chunks_with_one_key_the_first_counts() -> None:
    first, second = random_chunks(2, 60)
    index = ChunkIndex(lambda key: first)
    index.add_all([(key_of(0), first), (key_of(0), second)])
    assert len(index) == 1
    assert [match.length for match in index.match(first)] == [60]
    assert index.match(second) == []


def test_nothing_is_added_with_a_chunk_that_is_refused() -> None:
    index = ChunkIndex(lambda key: np.empty(0, np.int32))
    for key, ids, why in ((key_of(1), [-1], "token ids must"), ("no key", [1], "64 lower-case hex digits")):
        with pytest.raises(ValueError, match=why):
            index.add_all([(key_of(0), random_chunks(1, 50)[0]), (key, ids)])
    index.add_all([])
    assert len(index) == 0 and index.match(random_chunks(1, 50)[0]) == []


# --- RAM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "tokens"), [(12_000, 64), (3_000, 512)])
def test_ram_per_64_tokens(count: int, tokens: int) -> None:
    """Under 200 bytes per 64 tokens, and `nbytes` is what the allocator says."""
    chunks = np.random.default_rng(0).integers(0, VOCABULARY, (count, tokens), dtype=np.int32)
    probe = ChunkIndex(lambda key: chunks[int(key, 16)])  # lets numpy allocate what it allocates once
    probe.add(key_of(0), chunks[0])
    probe.match(chunks[0])
    gc.collect()
    tracemalloc.start()
    try:
        index = ChunkIndex(lambda key: chunks[int(key, 16)])
        for number in range(count):
            index.add(key_of(number), chunks[number])
        assert len(index.match(chunks[count // 2])) == 1
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert index.nbytes < 200 * count * tokens / 64
    assert traced == pytest.approx(index.nbytes, rel=0.02, abs=8192)


def test_ram_is_given_back() -> None:
    chunks = random_chunks(3000, 64)
    library = Library(chunks)
    library.index.match(chunks[0])
    full = library.index.nbytes
    for number in range(2990):
        library.index.remove(key_of(number))
    assert library.index.nbytes < full / 50
    for _ in range(20):
        for number in range(100):
            library.index.add(key_of(number), chunks[number])
            library.index.remove(key_of(number))
    assert library.index.nbytes < full / 20
    assert [match.key for match in library.match(chunks[2995])] == [key_of(2995)]


# --- properties ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(16, 200), min_size=1, max_size=12),
    picks=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 40)), max_size=12),
    changed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_planted_chunks_are_found_whole(
    lengths: list[int], picks: list[tuple[int, int]], changed: bool, seed: int
) -> None:
    """Whole, or less exactly the two edge tokens that were changed."""
    rng = np.random.default_rng(seed)
    lengths = [max(length, 18) for length in lengths] if changed else lengths
    library = Library([rng.integers(0, VOCABULARY, n, dtype=np.int32) for n in lengths])
    parts, expected, position = [glue(1)], [], 1
    for pick, tokens in picks:
        number = pick % len(lengths)
        ids = library.ids[key_of(number)].copy()
        if changed:
            ids[[0, -1]] = FRESH
        parts += [ids, glue(tokens)]
        expected.append((key_of(number), position + changed, len(ids) - 2 * changed, int(changed)))
        position += len(ids) + tokens
    assert spans(library.match(*parts)) == expected


def equal_runs(prompt: Ids, chunk: Ids) -> list[tuple[int, int]]:
    """All maximal runs, as (start, stop) in the prompt, of equal ids on any diagonal. By brute force."""
    runs = []
    for diagonal in range(1 - len(chunk), len(prompt)):
        start = None
        for position in range(max(0, diagonal), min(len(prompt), diagonal + len(chunk)) + 1):
            inside = position < min(len(prompt), diagonal + len(chunk))
            if inside and prompt[position] == chunk[position - diagonal]:
                start = position if start is None else start
            elif start is not None:
                runs.append((start, position))
                start = None
    return runs


@st.composite
def tangled(draw: st.DrawFn) -> tuple[list[Ids], Ids]:
    """Overlapping chunks cut from one document, and a prompt pasted together from pieces of it."""
    document = np.random.default_rng(draw(st.integers(0, 99))).permutation(200).astype(np.int32)
    cut = st.tuples(st.integers(0, 184), st.integers(16, 90)).map(lambda c: document[c[0] : c[0] + c[1]])
    chunks = draw(st.lists(cut.filter(lambda ids: len(ids) >= 16), min_size=1, max_size=6))
    pieces = draw(st.lists(st.one_of(cut, st.integers(0, 5).map(glue)), min_size=1, max_size=5))
    return chunks, np.concatenate([np.empty(0, np.int32), *pieces])


@settings(max_examples=60, deadline=None)
@given(tangled())
def test_no_equal_run_is_missed(case: tuple[list[Ids], Ids]) -> None:
    """Against brute force: of a run of 31 or more equal ids nothing as long as a window stays uncovered."""
    chunks, prompt = case
    library = Library(chunks)
    covered = np.zeros(len(prompt) + 1, np.bool_)
    for match in library.match(prompt):
        covered[match.start : match.end] = True
    for chunk in chunks:
        for start, stop in equal_runs(prompt, chunk):
            if stop - start >= 2 * WINDOW - 1:
                bounds = np.flatnonzero(covered[start:stop])
                gaps = np.diff(np.concatenate(([-1], bounds, [stop - start]))) - 1
                assert gaps.max() < WINDOW


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, 1), min_size=16, max_size=80), max_size=30),
    prompt=st.lists(st.integers(0, 1), max_size=200),
    period=st.integers(1, 5),
)
def test_repetitive_text_never_breaks_a_promise(chunks: list[list[int]], prompt: list[int], period: int) -> None:
    """Two ids only and short periods: everything is like everything. `Library.match` checks the promises."""
    periodic = [np.resize(np.asarray(ids[:period], np.int32), len(ids)) for ids in chunks]
    library = Library([np.asarray(ids, np.int32) for ids in chunks] + periodic)
    library.match(prompt, *periodic[:3], prompt)
    assert len(library.calls) == len(set(library.calls))


def test_chunks_that_seem_to_stand_in_a_prompt_are_announced_before_they_are_asked_for() -> None:
    rng = np.random.default_rng(5)
    chunks = [rng.integers(0, 50_000, 80).astype(np.int32) for _ in range(20)]
    said: list[list[str]] = []
    asked: list[str] = []

    def token_ids_of(key: str) -> Ids:
        assert said  # it was announced before
        asked.append(key)
        return chunks[int(key, 16)]

    index = ChunkIndex(token_ids_of, WINDOW, said.append)
    for number, ids in enumerate(chunks):
        index.add(key_of(number), ids)
    prompt = np.concatenate([chunks[3], chunks[7], chunks[9][:32]])  # a part is asked for, but was not foreseen
    assert [match.key for match in index.match(prompt)] == [key_of(3), key_of(7), key_of(9)]
    assert [sorted(keys) for keys in said] == [[key_of(3), key_of(7)]]
    assert sorted(asked) == [key_of(3), key_of(7), key_of(9)]
    index.match(np.concatenate(chunks))
    assert len(said[1]) == 16  # they might be many
