"""Entries of every codec: what comes back, what is refused, what is somebody else's, and stores of several codecs."""

from __future__ import annotations

import contextlib
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from contracts.kv import HEAD_DIM, HEADS, LAYERS, ORIGIN, TOKENS, join, random_chunk, split
from safetensors.torch import save

import rag_blend.codecs
from rag_blend.chunk import FORMAT, ChunkKV, LayerKV, chunk_key, digest_ids
from rag_blend.codecs import Codec, codec_names, codec_of
from rag_blend.codecs.raw import RawCodec
from rag_blend.entry import EntryHeader, encode_entry, read_header, read_layer
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError, FingerprintMismatchError, StoreError
from rag_blend.storage.memory import MemoryBackend
from rag_blend.store import KVStore

BEHIND_A_HEAD = replace(ORIGIN, head=digest_ids([1, 2, 3]))
OTHERS = [name for name in codec_names() if name != "raw"]
LOSSY = [name for name in codec_names() if not codec_of(name).lossless]


def chunk_of(seed: int = 7, **changes: Any) -> ChunkKV:
    return random_chunk(seed, BEHIND_A_HEAD, torch.float16, **changes)


def key_of(chunk: ChunkKV) -> str:
    return chunk_key(chunk.origin, chunk.token_ids)


def read(data: bytes, key: str) -> tuple[EntryHeader, list[LayerKV]]:
    """Header and all layers of an entry."""
    backend = MemoryBackend()
    backend.write(key, data)
    with backend.open(key) as reader:
        header = read_header(reader, key)
        return header, [read_layer(reader, header, i) for i in range(len(header.offsets))]


def refused_or_right(data: bytes, chunk: ChunkKV, layers: list[LayerKV]) -> bool:
    """True: refused. False: read, and exactly these layers. Anything else is an error."""
    try:
        header, got = read(data, key_of(chunk))
    except (CorruptChunkError, FingerprintMismatchError):
        return True
    assert header.origin == chunk.origin and np.array_equal(header.token_ids, chunk.token_ids)
    assert all(torch.equal(a, b) for x, y in zip(got, layers, strict=True) for a, b in zip(x, y, strict=True))
    return False


# --- what is written comes back ---


@pytest.mark.parametrize("shape", [(1, 2, 16, 8), (2, 1, 1, 4), (64, 3, 65, 80)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", codec_names())
def test_round_trip(name: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    num_layers, num_heads, num_tokens, head_dim = shape
    chunk = random_chunk(1, BEHIND_A_HEAD, dtype, num_tokens, num_layers, num_heads, head_dim)
    codec = codec_of(name)
    header, layers = read(encode_entry(chunk, dtype, codec), key_of(chunk))
    assert header.codec.name == name and header.origin == chunk.origin
    assert header.shape == (2, num_heads, num_tokens, head_dim)
    assert header.dtype == (dtype if codec.lossless else torch.float32)
    assert np.array_equal(header.token_ids, chunk.token_ids)
    assert header.staleness is not None and np.array_equal(header.staleness, chunk.staleness)
    for layer, wanted in zip(layers, chunk.layers, strict=True):
        expected = codec.decode(codec.encode(torch.stack(list(wanted)).to(header.dtype)), header.shape, header.dtype)
        assert torch.equal(torch.stack(list(layer)), expected)
        if codec.lossless:
            assert torch.equal(expected.float(), torch.stack(list(wanted)))


def written_before_there_were_codecs(chunk: ChunkKV, dtype: torch.dtype) -> bytes:
    """An entry of rag_blend.kv/2 as its first version wrote it, put together by hand."""
    layers = [torch.stack(list(layer)).to(dtype) for layer in chunk.layers]
    sums = []
    for i, layer in enumerate(layers):
        said = f"{i} {dtype} {tuple(layer.shape)}".encode()
        sums.append(xxhash.xxh3_128_hexdigest(said + layer.view(torch.uint8).numpy().tobytes()))
    assert chunk.staleness is not None
    metadata = {
        "format": "rag_blend.kv/2",
        "origin": json.dumps(asdict(chunk.origin)),
        "checksums": json.dumps(sums),
        "chunk_staleness": xxhash.xxh3_128_hexdigest(chunk.staleness.tobytes()),
    }
    tensors = {f"layer.{i:03d}": layer for i, layer in enumerate(layers)}
    tensors["token_ids"] = torch.from_numpy(chunk.token_ids)
    tensors["chunk_staleness"] = torch.from_numpy(chunk.staleness)
    return save(tensors, metadata)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_raw_entries_are_those_of_before_there_were_codecs(dtype: torch.dtype) -> None:
    chunk = random_chunk(3, BEHIND_A_HEAD, dtype)
    old = written_before_there_were_codecs(chunk, dtype)
    header, layers = read(old, key_of(chunk))
    assert (FORMAT, header.codec.name, header.dtype) == ("rag_blend.kv/2", "raw", dtype)
    assert not refused_or_right(old, chunk, [LayerKV(*(side.to(dtype) for side in layer)) for layer in chunk.layers])
    assert len(layers) == LAYERS
    assert split(encode_entry(chunk, dtype)) == split(old)  # safetensors writes metadata in any order


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_see_what_was_computed(name: str) -> None:
    """Not its 16 bits: in bfloat16 they alone would cost as much as int8."""
    chunk = random_chunk(1, BEHIND_A_HEAD)
    fine, coarse = (
        read(encode_entry(chunk, dtype, codec_of(name)), key_of(chunk))[1] for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(a, b) for x, y in zip(fine, coarse, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", LOSSY)
def test_a_head_is_not_written_by_a_lossy_codec(name: str) -> None:
    head, primed = random_chunk(1, ORIGIN), random_chunk(1, replace(ORIGIN, prime=digest_ids([5])))
    for chunk, codec in ((head, "raw"), (primed, name), (random_chunk(1, BEHIND_A_HEAD), name)):
        header, _ = read(encode_entry(chunk, torch.float16, codec_of(name)), key_of(chunk))
        assert header.codec.name == codec
    header, layers = read(encode_entry(head, torch.float32, codec_of(name)), key_of(head))
    assert all(torch.equal(a, b) for x, y in zip(layers, head.layers, strict=True) for a, b in zip(x, y, strict=True))
    header, _ = read(encode_entry(head, torch.float16, codec_of("zstd")), key_of(head))
    assert header.codec.name == "zstd"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", codec_names())
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    chunk = chunk_of()
    chunk.layers[1].values[0, 3, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        encode_entry(chunk, torch.float16, codec_of(name))


@pytest.mark.parametrize("name", LOSSY)
def test_what_a_codec_cannot_express_is_refused(name: str) -> None:
    chunk = chunk_of()
    chunk.layers[1].values[0, 3, 2] = 1e9
    with pytest.raises(ValueError, match="too large"):
        encode_entry(chunk, torch.bfloat16, codec_of(name))


# --- what is damaged is refused ---


@pytest.fixture(params=OTHERS)
def entry(request: pytest.FixtureRequest) -> tuple[ChunkKV, bytes, list[LayerKV]]:
    """A chunk, its bytes by a codec, and what they hold."""
    chunk = chunk_of()
    data = encode_entry(chunk, torch.float16, codec_of(request.param))
    return chunk, data, read(data, key_of(chunk))[1]


Entry = tuple[ChunkKV, bytes, list[LayerKV]]


def _flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_a_flipped_bit_of_the_header_does_no_harm(entry: Entry) -> None:
    chunk, data, layers = entry
    end = len(data) - len(split(data)[1])
    # A letter of a layer's own shape says nothing that the offsets do not say.
    refused = [refused_or_right(_flipped(data, bit), chunk, layers) for bit in range(0, 8 * end, 3)]
    assert refused.count(True) > 0.9 * len(refused)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_flipped_bits_of_a_layer_are_found(entry: Entry, layer: int) -> None:
    chunk, data, _ = entry
    header, rest = split(data)
    start, end = (len(data) - len(rest) + offset for offset in header[f"layer.{layer:03d}"]["data_offsets"])
    for bit in [8 * start, 8 * end - 1, *range(8 * start, 8 * end, 97)]:
        backend = MemoryBackend()
        backend.write(key_of(chunk), _flipped(data, bit))
        with backend.open(key_of(chunk)) as reader:
            found = read_header(reader, key_of(chunk))
            for i in range(LAYERS):
                if i == layer:
                    with pytest.raises(CorruptChunkError, match=f"layer {layer} does not match"):
                        read_layer(reader, found, i)
                else:
                    read_layer(reader, found, i)


def test_every_truncation_is_found(entry: Entry) -> None:
    chunk, data, layers = entry
    for cut in (*range(0, len(data), 53), len(data) - 1):
        assert refused_or_right(data[:cut], chunk, layers), cut


Header = dict[str, Any]


def _lie(change: Callable[[Header], None]) -> Callable[[bytes], bytes]:
    def tell(data: bytes) -> bytes:
        header, rest = split(data)
        change(header)
        return join(header, rest)

    return tell


def _says(**fields: Any) -> Callable[[bytes], bytes]:
    """Another description of what the layers decode to."""

    def change(header: Header) -> None:
        said = json.loads(header["__metadata__"]["layers"])
        header["__metadata__"]["layers"] = json.dumps({**said, **fields})

    return _lie(change)


def _meta(name: str, to: Any) -> Callable[[bytes], bytes]:
    return _lie(lambda header: header["__metadata__"].update({name: to}))


def _each(change: Callable[[Header], None]) -> Callable[[bytes], bytes]:
    return _lie(lambda header: [change(header[name]) for name in header if name.startswith("layer.")] and None)


LIES: dict[str, Callable[[bytes], bytes]] = {
    "no description": _lie(lambda h: h["__metadata__"].pop("layers")),
    "a description of another kind": _meta("layers", "[]"),
    "a description that is no JSON": _meta("layers", "{"),
    "a deep description": _meta("layers", "[" * 100_000),
    "another dtype": _says(dtype="BF16"),
    "a wider dtype": _says(dtype="F64"),
    "heads and dims swapped": _says(shape=[2, HEAD_DIM, TOKENS, HEADS]),
    "more heads": _says(shape=[2, HEADS + 1, TOKENS, HEAD_DIM]),
    "fewer heads": _says(shape=[2, HEADS - 1, TOKENS, HEAD_DIM]),
    "more tokens": _says(shape=[2, HEADS, TOKENS + 1, HEAD_DIM]),
    "a huge shape": _says(shape=[2, 2**40, TOKENS, 2**40]),
    "a large shape": _says(shape=[2, 2**18, TOKENS, HEAD_DIM]),
    "an infinite shape": _says(shape=[2, float("inf"), TOKENS, HEAD_DIM]),
    "a negative shape": _says(shape=[2, -HEADS, TOKENS, -HEAD_DIM]),
    "a flat shape": _says(shape=[2 * HEADS * TOKENS * HEAD_DIM]),
    "no shape": _says(shape=None),
    "raw": _lie(lambda h: h["__metadata__"].pop("codec")),
    "raw by name": _meta("codec", "raw"),
    "no name": _meta("codec", ""),
    "a path": _meta("codec", "../int8"),
    "a number": _meta("codec", 8),
    "a list": _meta("codec", ["int8"]),
    "layers that are no bytes": _each(lambda layer: layer.update(dtype="F16")),
    "layers longer by one": _each(lambda layer: layer["data_offsets"].__setitem__(0, layer["data_offsets"][0] - 1)),
    "layers shorter by one": _each(lambda layer: layer["data_offsets"].__setitem__(1, layer["data_offsets"][1] - 1)),
    "no layers": _each(lambda layer: layer.update(data_offsets=[96, 96])),
    "layers outside": _each(lambda layer: layer.update(data_offsets=[2**62, 2**62 + 500])),
    "all at one place": _each(lambda layer: layer.update(data_offsets=[96, 700])),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_entry_is_corrupt(entry: Entry, lie: str) -> None:
    chunk, data, _ = entry
    told = LIES[lie](data)
    assert told != data
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunkError):
            read(told, key_of(chunk))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("other", codec_names())
def test_an_entry_is_not_read_by_another_codec(entry: Entry, other: str) -> None:
    chunk, data, layers = entry
    claimed = _meta("codec", other)(data)
    assert refused_or_right(claimed, chunk, layers) is (other != split(data)[0]["__metadata__"]["codec"])


def forged(chunk: ChunkKV, name: str, layer: bytes) -> bytes:
    """An entry whose layers hold these bytes and whose checksums are right."""
    header, _ = split(encode_entry(chunk, torch.float16, codec_of(name)))
    dtype = torch.float16 if codec_of(name).lossless else torch.float32
    said = f"{name} {dtype} {(2, HEADS, TOKENS, HEAD_DIM)}"
    metadata = {
        **header["__metadata__"],
        "checksums": json.dumps([xxhash.xxh3_128_hexdigest(f"{i} {said}".encode() + layer) for i in range(LAYERS)]),
    }
    assert chunk.staleness is not None
    tensors = {f"layer.{i:03d}": torch.tensor(list(layer), dtype=torch.uint8) for i in range(LAYERS)}
    tensors["token_ids"] = torch.from_numpy(chunk.token_ids)
    tensors["chunk_staleness"] = torch.from_numpy(chunk.staleness)
    return save(tensors, metadata)


def encoded(name: str, chunk: ChunkKV) -> bytes:
    dtype = torch.float16 if codec_of(name).lossless else torch.float32
    return codec_of(name).encode(torch.stack(list(chunk.layers[0])).to(dtype)).numpy().tobytes()


@pytest.mark.parametrize("name", OTHERS)
def test_forging_faithfully_is_no_lie(name: str) -> None:
    """So what the next test forges is refused for what it holds."""
    chunk = chunk_of()
    _, layers = read(forged(chunk, name, encoded(name, chunk)), key_of(chunk))
    _, wanted = read(encode_entry(chunk, torch.float16, codec_of(name)), key_of(chunk))
    assert torch.equal(layers[0].keys, wanted[0].keys) and torch.equal(layers[2].values, wanted[0].values)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, lambda data: b"\xff\x7f" + data[2:]) for name in LOSSY),  # a scale that is not a number
        ("zstd", lambda data: data[: 2 * HEADS * TOKENS * HEAD_DIM] + b"(\xb5/\xfd" + bytes(40)),
        ("zstd", lambda data: data[:-1]),
        ("zstd", lambda data: data + b"\0"),
    ],
)
def test_what_nobody_could_have_written_is_corrupt_in_spite_of_its_checksum(
    name: str, change: Callable[[bytes], bytes]
) -> None:
    chunk = chunk_of()
    data = forged(chunk, name, change(encoded(name, chunk)))
    backend = MemoryBackend()
    backend.write(key_of(chunk), data)
    with backend.open(key_of(chunk)) as reader:
        header = read_header(reader, key_of(chunk))
        with pytest.raises(CorruptChunkError, match="layer 1: "):
            read_layer(reader, header, 1)


# --- stores of several codecs, and codecs of somebody else ---


def store_on(backend: MemoryBackend, codec: str | Codec = "raw") -> KVStore:
    return KVStore(backend, ORIGIN.fingerprint, ORIGIN.namespace, torch.float16, codec)


def test_one_store_holds_entries_of_all_codecs() -> None:
    backend = MemoryBackend()
    keys = {}
    for seed, name in enumerate(codec_names()):
        keys[name] = store_on(backend, name).put(chunk_of(seed)).key
        assert keys[name] == store_on(backend).key_of(BEHIND_A_HEAD, chunk_of(seed).token_ids)
    for own in codec_names():
        for name, key in keys.items():
            with store_on(backend, own).open(key) as stored:
                assert stored.header.codec.name == name
                assert stored.layer(2).keys.shape == (HEADS, TOKENS, HEAD_DIM)


def test_the_newest_of_two_entries_stands() -> None:
    backend = MemoryBackend()
    for name in (*codec_names(), "raw"):
        written = store_on(backend, name).put(chunk_of())
        assert (len(list(backend.keys())), backend.stats().bytes) == (1, written.num_bytes)
        with store_on(backend).open(written.key) as stored:
            assert stored.header.codec.name == name


def test_an_unknown_codec_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown codec 'int5'; known: int4, int8"):
        store_on(MemoryBackend(), "int5")


class MyCodec(RawCodec):
    """Somebody's own: raw, back to front."""

    name = "mine"

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        return super().encode(layer).flip(0)

    def decode(self, data: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(data.flip(0), shape, dtype)


def is_not_ours(backend: MemoryBackend, key: str) -> bool:
    """Whether an entry is a miss and stays as it is."""
    before = dict(backend.labels()), backend.stats().bytes
    store = store_on(backend)
    with pytest.raises(FingerprintMismatchError):
        store.open(key)
    assert not store.has(key)
    with pytest.raises(KeyError):
        store.token_ids(key)
    assert not store.counts.get("corrupt") and not store.counts.get("missing")
    return (dict(backend.labels()), backend.stats().bytes) == before


def test_an_entry_of_an_unknown_codec_is_a_miss_and_stays() -> None:
    backend = MemoryBackend()
    theirs = store_on(backend, MyCodec())
    key = theirs.put(chunk_of()).key
    assert is_not_ours(backend, key)
    with theirs.open(key) as stored:
        assert torch.equal(stored.layer(1).keys.float(), chunk_of().layers[1].keys)
    assert store_on(backend).put(chunk_of()).key == key  # ingesting anew makes it everybody's
    for store in (theirs, store_on(backend)):
        with store.open(key) as stored:
            assert torch.equal(stored.layer(1).keys.float(), chunk_of().layers[1].keys)


@contextlib.contextmanager
def without_zstandard() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        patch.delitem(sys.modules, "rag_blend.codecs.zstd", raising=False)
        rag_blend.codecs._own.cache_clear()
        yield
    rag_blend.codecs._own.cache_clear()


def test_an_entry_whose_library_is_missing_is_a_miss_and_stays() -> None:
    backend = MemoryBackend()
    key = store_on(backend, "zstd").put(chunk_of()).key
    with without_zstandard():
        assert is_not_ours(backend, key)
        with pytest.raises(FingerprintMismatchError, match="pip install"):
            store_on(backend).open(key)
        with pytest.raises(ModuleNotFoundError, match="pip install"):
            store_on(backend, "zstd")


def test_a_damaged_entry_of_a_known_codec_is_set_aside() -> None:
    backend = MemoryBackend()
    store = store_on(backend, "int8")
    key = store.put(chunk_of()).key
    with backend.open(key) as reader:
        backend.write(key, reader.read(0, reader.size - 1).tobytes())
    with pytest.raises(StoreError):
        store.open(key)
    assert store.counts["corrupt"] == 1
    with pytest.raises(ChunkNotFoundError):
        backend.open(key)
