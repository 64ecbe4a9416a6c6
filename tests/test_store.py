from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.kv import ORIGIN, random_chunk

import rag_blend.store
from rag_blend.chunk import NO_TOKENS, ChunkKV, ChunkOrigin, ModelFingerprint, chunk_key
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError, FingerprintMismatchError, StoreError
from rag_blend.storage import EntryReader, StorageBackend
from rag_blend.storage.base import Bytes
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend
from rag_blend.store import KVStore

MODEL = ModelFingerprint("weights", "config", "tokenizer", "float32", "float16")


def store_on(backend: StorageBackend, model: ModelFingerprint = MODEL, namespace: str = "tenant") -> KVStore:
    return KVStore(backend, model.digest, namespace, torch.float16)


def chunk_of(store: KVStore, seed: int = 0, head: str = NO_TOKENS, prime: str = NO_TOKENS) -> ChunkKV:
    return random_chunk(seed, store.origin(head, prime), torch.float16)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[DiskBackend]:
    backend = DiskBackend(tmp_path / "kv")
    yield backend
    backend.close()


@pytest.fixture
def store(backend: DiskBackend) -> KVStore:
    return store_on(backend)


def path_of(store: KVStore, key: str) -> Path:
    assert isinstance(store.backend, DiskBackend)
    return store.backend.directory / key[:2] / f"{key}.safetensors"


def damage(store: KVStore, key: str, at: int = -1) -> None:
    """Flip a bit of the last layer (or elsewhere)."""
    data = bytearray(path_of(store, key).read_bytes())
    data[at] ^= 1
    path_of(store, key).write_bytes(data)


# --- put and open ---


def test_what_is_put_is_found(store: KVStore) -> None:
    chunk = chunk_of(store)
    written = store.put(chunk)
    assert written.key == store.key_of(chunk.origin, chunk.token_ids) == chunk_key(chunk.origin, chunk.token_ids)
    assert written.num_bytes == path_of(store, written.key).stat().st_size
    stored = store.open(written.key)
    assert stored.key == written.key
    assert stored.header.origin == chunk.origin
    for i, layer in enumerate(chunk.layers):
        assert torch.equal(stored.layer(i).keys.float(), layer.keys)
        assert torch.equal(stored.layer(i).values.float(), layer.values)
    stored.close()
    assert store.has(written.key)
    assert np.array_equal(store.token_ids(written.key), chunk.token_ids)
    assert store.counts == {}


def test_a_refused_chunk_is_not_there(store: KVStore) -> None:
    chunk = chunk_of(store)
    chunk.layers[0].keys[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        store.put(chunk)
    assert not store.has(chunk_key(chunk.origin, chunk.token_ids))
    assert list(store.backend.keys()) == []


def test_a_missing_chunk_is_a_counted_miss(store: KVStore) -> None:
    key = chunk_key(store.origin(NO_TOKENS, NO_TOKENS), [1, 2, 3])
    with pytest.raises(ChunkNotFoundError):
        store.open(key)
    assert not store.has(key)
    assert store.counts == {"missing": 1}


# --- other models and tenants ---


def _changed(field: str) -> ModelFingerprint:
    return replace(MODEL, **{field: getattr(MODEL, field)[:-1] + "x"})


@pytest.mark.parametrize("field", [f.name for f in fields(ModelFingerprint)])
def test_another_model_is_a_miss(store: KVStore, field: str) -> None:
    mine = chunk_of(store)
    key = store.put(mine).key
    other = store_on(store.backend, _changed(field))
    assert other.fingerprint != store.fingerprint
    same_text = chunk_of(other)
    with pytest.raises(ChunkNotFoundError):
        other.open(chunk_key(same_text.origin, same_text.token_ids))
    with pytest.raises(FingerprintMismatchError):
        other.open(key)
    with pytest.raises(KeyError):
        other.token_ids(key)
    assert not other.has(key)
    assert list(other.scan()) == []
    assert other.counts == {"missing": 1, "foreign": 4}
    assert path_of(store, key).exists()  # somebody else's, not damaged
    assert store.has(key)
    other.put(same_text)
    assert len(list(store.backend.keys())) == 2


@pytest.mark.parametrize("field", [f.name for f in fields(ChunkOrigin)])
def test_every_part_of_the_origin_makes_another_key(store: KVStore, field: str) -> None:
    chunk = chunk_of(store)
    key = store.put(chunk).key
    other = replace(chunk.origin, **{field: "f" * 64})
    assert chunk_key(other, chunk.token_ids) != key
    with pytest.raises(ChunkNotFoundError):
        store.open(chunk_key(other, chunk.token_ids))
    # The same bytes under the other key, as a mixed-up directory would have them: equal in size, and refused.
    forced = chunk_key(other, chunk.token_ids)
    store.backend.write(forced, path_of(store, key).read_bytes())
    with pytest.raises(CorruptChunkError, match="another key"):
        store.open(forced)
    # An honest entry of that origin: refused where model or tenant differ, else the caller decides.
    store.put(chunk._replace(origin=other))
    if field in {"fingerprint", "namespace"}:
        with pytest.raises(FingerprintMismatchError):
            store.open(forced)
    else:
        stored = store.open(forced)
        assert getattr(stored.header.origin, field) == "f" * 64
        stored.close()


def test_every_token_makes_another_key(store: KVStore) -> None:
    chunk = chunk_of(store)
    keys = {chunk_key(chunk.origin, chunk.token_ids)}
    for i in range(len(chunk.token_ids)):
        ids = chunk.token_ids.copy()
        ids[i] += 1
        keys.add(chunk_key(chunk.origin, ids))
    keys.add(chunk_key(chunk.origin, chunk.token_ids[:-1]))
    assert len(keys) == len(chunk.token_ids) + 2
    assert chunk_key(chunk.origin, chunk.token_ids.tolist()) in keys
    assert chunk_key(chunk.origin, chunk.token_ids.astype(np.int64)) in keys


def test_origins_cannot_be_confused_by_shifting_text_between_fields() -> None:
    values = ("ab", "c", "d", "e"), ("a", "bc", "d", "e"), ("ab", "", "cd", "e")
    assert len({chunk_key(ChunkOrigin(*v), [1]) for v in values}) == 3
    assert set(asdict(ORIGIN)) == {"fingerprint", "namespace", "head", "prime"}


def test_tenants_never_meet(store: KVStore) -> None:
    other = store_on(store.backend, namespace="other")
    keys = [s.put(chunk_of(s)).key for s in (store, other)]
    assert keys[0] != keys[1]
    for mine, s, theirs in ((keys[0], store, keys[1]), (keys[1], other, keys[0])):
        assert [key for key, *_ in s.scan()] == [mine]
        assert s.has(mine) and not s.has(theirs)
        with pytest.raises(FingerprintMismatchError):
            s.open(theirs)
    assert store.record_name("a", "b") != other.record_name("a", "b")
    assert store.record_name("a", "b") != store.record_name("ab")
    store.link("doc", [keys[0]])
    other.link("doc", [keys[1]])
    assert store.forget({"doc"}) == [keys[0]]
    assert other.has(keys[1])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(("a", "b\x1fc"), ("a\x1fb", "c")), (("a", "\x1f"), ("a\x1f", "")), (("a", 'x", "y'), ('a", "x', "y"))],
)
def test_no_name_reaches_another_tenants_document(mine: tuple[str, str], theirs: tuple[str, str]) -> None:
    backend = MemoryBackend()
    victim = store_on(backend, namespace=theirs[0])
    victim.link(theirs[1], [victim.put(chunk_of(victim)).key])
    assert store_on(backend, namespace=mine[0]).forget({mine[1]}) == []
    assert len(list(victim.scan())) == 1


# --- damage ---


def test_a_damaged_header_is_quarantined_counted_and_replaceable(store: KVStore) -> None:
    chunk = chunk_of(store)
    key = store.put(chunk).key
    damage(store, key, at=40)
    with pytest.raises(CorruptChunkError):
        store.open(key)
    assert store.counts == {"corrupt": 1}
    assert path_of(store, key).with_suffix(".safetensors.bad").exists()
    with pytest.raises(ChunkNotFoundError):
        store.open(key)
    assert store.counts == {"corrupt": 1, "missing": 1}
    assert store.put(chunk).key == key
    store.open(key).close()
    assert torch.equal(store.open(key).layer(2).values.float(), chunk.layers[2].values)


def test_has_finds_damage_too(store: KVStore) -> None:
    key = store.put(chunk_of(store)).key
    damage(store, key, at=40)
    assert not store.has(key)
    assert store.counts == {"corrupt": 1}
    assert list(store.backend.keys()) == []


def test_damage_in_a_layer_shows_when_the_layer_is_read(store: KVStore) -> None:
    key = store.put(chunk_of(store)).key
    damage(store, key)
    stored = store.open(key)
    stored.layer(0)
    with pytest.raises(CorruptChunkError) as caught:
        stored.layer(2)
    stored.close()
    store.token_ids(key)
    store.discard_damaged(key, caught.value)
    assert store.counts == {"corrupt": 1}
    with pytest.raises(KeyError):
        store.token_ids(key)  # not remembered any longer
    assert not store.has(key)


def test_a_medium_that_cannot_even_quarantine(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.put(chunk_of(store)).key
    damage(store, key, at=40)

    def refuse(key: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store.backend, "quarantine", refuse)
    with pytest.raises(CorruptChunkError):
        store.open(key)
    with pytest.raises(KeyError):
        store.token_ids(key)
    assert store.counts == {"corrupt": 2, "unavailable": 2}


# --- a medium that does not answer ---


class _Silent(EntryReader):
    def __init__(self, reader: EntryReader, good_reads: int) -> None:
        self.size = reader.size
        self._reader = reader
        self._good_reads = good_reads
        self.closed = False

    def read(self, offset: int, length: int) -> Bytes:
        self._good_reads -= 1
        if self._good_reads < 0:
            raise OSError(errno.EIO, "Input/output error")
        return self._reader.read(offset, length)

    def close(self) -> None:
        self.closed = True
        self._reader.close()


class _Flaky(MemoryBackend):
    """Memory whose methods can be told to fail, and which keeps no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.good_reads: int | None = None
        self.fails: set[str] = set()
        self.refuses_to_delete: set[str] = set()
        self.readers: list[_Silent] = []

    def open(self, key: str) -> EntryReader:
        if "open" in self.fails:
            raise PermissionError(errno.EACCES, "Permission denied")
        reader = super().open(key)
        if self.good_reads is None:
            return reader
        self.readers.append(_Silent(reader, self.good_reads))
        return self.readers[-1]

    def keys(self) -> Iterator[str]:
        yield from super().keys()
        if "keys" in self.fails:
            raise OSError(errno.EIO, "Input/output error")

    def labels(self) -> Iterator[tuple[str, bytes]]:
        return StorageBackend.labels(self)

    def unlink(self, documents: Set[str]) -> None:
        if "unlink" in self.fails:
            raise OSError(errno.ENOSPC, "database or disk is full")
        super().unlink(documents)

    def delete(self, key: str) -> bool:
        if key in self.refuses_to_delete:
            raise OSError(errno.EROFS, "Read-only file system")
        return super().delete(key)


USES: dict[str, tuple[Callable[[KVStore, str], object], type[Exception] | None]] = {
    "open": (lambda store, key: store.open(key), StoreError),
    "token_ids": (lambda store, key: store.token_ids(key), StoreError),
    "has": (lambda store, key: store.has(key), None),
    "scan": (lambda store, key: list(store.scan()), None),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("good_reads", [None, 0, 1])
def test_an_unanswered_read_is_a_counted_miss(use: str, good_reads: int | None) -> None:
    backend = _Flaky()
    store = store_on(backend)
    chunk = random_chunk(0, store.origin(NO_TOKENS, NO_TOKENS), num_layers=150, num_heads=1, head_dim=2)
    key = store.put(chunk).key  # its header takes two reads
    backend.good_reads = good_reads
    if good_reads is None:
        backend.fails.add("open")
    call, error = USES[use]
    if error is None:
        assert not call(store, key)
    else:
        with pytest.raises(error):
            call(store, key)
    assert store.counts == {"unavailable": 1}
    assert [r for r in backend.readers if not r.closed] == []
    backend.good_reads = None
    backend.fails.clear()
    assert store.has(key)  # nothing was set aside


def test_what_an_entry_says_of_itself_takes_one_read() -> None:
    """Each is a way to the medium and back: with ids and staleness read apart, opening would take three."""
    backend = _Flaky()
    store = store_on(backend)
    chunk = chunk_of(store)
    key = store.put(chunk).key
    backend.good_reads = 1
    with store.open(key) as stored:
        assert np.array_equal(stored.header.token_ids, chunk.token_ids)
        assert np.array_equal(stored.header.staleness, chunk.staleness)


def test_an_entry_of_many_layers_takes_a_second_read(store: KVStore) -> None:
    chunk = random_chunk(0, store.origin(NO_TOKENS, NO_TOKENS), num_layers=150, num_heads=1, head_dim=2)
    key = store.put(chunk).key
    assert int.from_bytes(path_of(store, key).read_bytes()[:8], "little") > 1 << 14
    stored = store.open(key)
    assert torch.equal(stored.layer(149).keys, chunk.layers[149].keys.half())
    stored.close()


def test_a_listing_that_breaks_off_gives_what_it_had() -> None:
    backend = _Flaky()
    store = store_on(backend)
    keys = {store.put(chunk_of(store, seed)).key for seed in range(3)}
    backend.fails.add("keys")
    assert {key for key, *_ in store.scan()} == keys
    assert store.counts == {"unavailable": 1}


# --- scan, token ids ---


def test_scan_gives_only_what_is_whole_and_ours(store: KVStore) -> None:
    mine = {store.put(chunk_of(store, seed)).key for seed in range(4)}
    spoilt = sorted(mine)[0]
    damage(store, spoilt, at=40)
    other = store_on(store.backend, namespace="other")
    other.put(chunk_of(other))
    store.backend.write("a" * 64, b"no entry at all")
    found = list(store.scan())
    assert {chunk.key for chunk in found} == mine - {spoilt}
    assert all(chunk.origin.namespace == "tenant" for chunk in found)
    assert store.counts == {"corrupt": 2, "foreign": 1}
    assert {chunk.key for chunk in store.scan()} == mine - {spoilt}
    assert store.counts == {"corrupt": 2, "foreign": 2}  # the damaged ones are out of the way


def test_scan_of_any_model_stays_with_the_tenant(store: KVStore) -> None:
    other_model = store_on(store.backend, _changed("weights"))
    other_tenant = store_on(store.backend, namespace="other")
    keys = [s.put(chunk_of(s)).key for s in (store, other_model, other_tenant)]
    assert {key for key, *_ in store.scan(any_model=True)} == set(keys[:2])
    assert {key for key, *_ in store.scan()} == set(keys[:1])


def test_scan_warns_once_however_much_is_unreadable(
    store: KVStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [store.put(chunk_of(store, seed)).key for seed in range(8)]
    for key in keys[:3]:
        path_of(store, key).write_bytes(b"")
    silent, usual = set(keys[3:5]), store.backend.open

    def open_(key: str) -> EntryReader:
        if key in silent:
            raise OSError(errno.EIO, "Input/output error")
        return usual(key)

    monkeypatch.setattr(store.backend, "open", open_)
    monkeypatch.setattr(store.backend, "labels", lambda: StorageBackend.labels(store.backend))
    with caplog.at_level(logging.DEBUG, "rag_blend"):
        assert {key for key, *_ in store.scan()} == set(keys[5:])
    assert store.counts == {"corrupt": 3, "unavailable": 2}
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "5 stored cache entries" in warnings[0]
    assert len([r for r in caplog.records if r.levelno == logging.DEBUG]) == 5
    caplog.clear()
    store.open(keys[5]).close()
    with pytest.raises(StoreError):
        store.open(keys[4])  # asked for by name, it is worth a warning
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    caplog.clear()
    silent.clear()
    assert len(list(store.scan())) == 5 and caplog.records == []


def test_token_ids_are_read_once(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = chunk_of(store)
    key = store.put(chunk).key
    first = store.token_ids(key)
    monkeypatch.setattr(store.backend, "open", lambda key: pytest.fail("read again"))
    assert store.token_ids(key) is first
    assert np.array_equal(first, chunk.token_ids)


def test_the_memory_of_token_ids_is_bounded_and_keeps_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag_blend.store, "_REMEMBERED_HEADERS", 3)
    store = store_on(MemoryBackend())
    keys = [store.put(chunk_of(store, seed)).key for seed in range(4)]
    for key in keys[:3]:
        store.token_ids(key)
    store.token_ids(keys[0])
    store.token_ids(keys[3])  # drops keys[1], the longest unused
    for key in keys:
        store.backend.delete(key)
    assert [len(store.token_ids(keys[i])) for i in (0, 2, 3)] == [24] * 3
    with pytest.raises(KeyError):
        store.token_ids(keys[1])


# --- forget ---


def test_forget_spares_what_other_documents_need(store: KVStore) -> None:
    keys = [store.put(chunk_of(store, seed)).key for seed in range(3)]
    store.link("a", keys[:2])
    store.link("b", keys[1:])
    for key in keys:
        store.token_ids(key)
    assert store.forget({"a"}) == [keys[0]]
    assert [store.has(key) for key in keys] == [False, True, True]
    with pytest.raises(KeyError):
        store.token_ids(keys[0])
    assert store.forget({"a"}) == []
    assert store.forget({"b"}) == sorted(keys[1:])
    assert list(store.backend.keys()) == []
    assert store.forget({"unknown"}) == []


def test_forget_erases_quarantined_remains(store: KVStore, backend: DiskBackend) -> None:
    key = store.put(chunk_of(store)).key
    store.link("a", [key])
    damage(store, key, at=40)
    assert not store.has(key)
    assert store.forget({"a"}) == [key]
    assert [p for p in backend.directory.rglob("*") if key in p.name] == []


def test_forget_that_fails_can_be_repeated() -> None:
    backend = _Flaky()
    store = store_on(backend)
    keys = sorted(store.put(chunk_of(store, seed)).key for seed in range(3))
    store.link("a", keys)
    backend.refuses_to_delete.add(keys[1])
    with pytest.raises(OSError):
        store.forget({"a"})
    backend.refuses_to_delete.clear()
    assert store.forget({"a"}) == keys
    assert list(backend.keys()) == []


def test_documents_are_forgotten_together(store: KVStore) -> None:
    keys = sorted(store.put(chunk_of(store, seed)).key for seed in range(4))
    store.link("a", keys[:2])
    store.link("b", keys[1:3])
    assert store.forget({"a", "b", "unknown"}) == keys[:3]
    assert list(store.backend.keys()) == keys[3:]


def test_what_was_primed_with_a_text_goes_too(store: KVStore) -> None:
    other_model = store_on(store.backend, _changed("weights"))
    other_tenant = store_on(store.backend, namespace="other")
    doomed = [s.put(chunk_of(s, prime=prime)).key for s in (store, other_model) for prime in ("d" * 64, "e" * 64)]
    kept = [
        store.put(chunk_of(store)).key,
        store.put(chunk_of(store, prime="f" * 64)).key,
        other_tenant.put(chunk_of(other_tenant, prime="d" * 64)).key,
    ]
    store.link("a", [doomed[0], kept[0]])
    store.link("b", [kept[0]])
    assert store.forget({"a"}, primes={"d" * 64, "e" * 64}) == sorted(doomed)
    assert sorted(store.backend.keys()) == sorted(kept)
    assert store.forget({"b"}) == [kept[0]]


def test_forget_frees_before_it_writes() -> None:
    """On a full disk the table cannot be changed until something was deleted."""
    backend = _Flaky()
    store = store_on(backend)
    keys = sorted(store.put(chunk_of(store, seed)).key for seed in range(2))
    primed = store.put(chunk_of(store, prime="d" * 64)).key
    store.link("a", keys)
    backend.fails.add("unlink")
    with pytest.raises(OSError):
        store.forget({"a"}, primes={"d" * 64})
    assert list(backend.keys()) == []
    with pytest.raises(KeyError):
        store.token_ids(primed)
    backend.fails.clear()
    assert store.forget({"a"}) == keys
    assert store.forget({"a"}) == []


def test_forget_that_cannot_see_everything_says_so() -> None:
    backend = _Flaky()
    store = store_on(backend)
    store.link("a", [store.put(chunk_of(store)).key])
    backend.fails.add("keys")
    with pytest.raises(OSError):
        store.forget({"a"}, primes={"d" * 64})
    backend.fails.clear()
    assert len(store.forget({"a"}, primes={"d" * 64})) == 1


def test_counts_are_a_copy(store: KVStore) -> None:
    counts = store.counts
    assert not store.has("0" * 64)
    with pytest.raises(ChunkNotFoundError):
        store.open("0" * 64)
    assert counts == {}
    assert store.counts == {"missing": 1}


class _FarAway(MemoryBackend):
    """Answers as soon as three ask at once."""

    parallel_reads = 3

    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(3, timeout=10)

    def open(self, key: str) -> EntryReader:
        self.meeting.wait()
        return super().open(key)


def test_what_will_be_asked_for_is_read_at_once() -> None:
    backend = _FarAway()
    store = store_on(backend)
    chunks = [chunk_of(store, seed) for seed in range(2)]
    keys = [store.put(chunk).key for chunk in chunks]
    errors = store.read_ahead([*keys, "f" * 64])
    assert list(errors) == ["f" * 64] and isinstance(errors["f" * 64], KeyError)
    assert store.counts == {"missing": 1}
    for key, chunk in zip(keys, chunks, strict=True):  # nobody else would come to the meeting
        assert np.array_equal(store.token_ids(key), chunk.token_ids)
    assert store.read_ahead(keys) == {}


def test_one_entry_is_not_read_ahead() -> None:
    backend = _FarAway()
    store = store_on(backend)
    assert store.read_ahead([store.put(chunk_of(store)).key]) == {}
