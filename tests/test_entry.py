from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.kv import HEAD_DIM, HEADS, LAYERS, ORIGIN, TOKENS, join, random_chunk, split
from safetensors import safe_open

from rag_blend.chunk import FORMAT, ChunkKV, LayerKV, chunk_key
from rag_blend.entry import MAX_HEADER_BYTES, EntryHeader, encode_entry, read_header, read_layer
from rag_blend.errors import CorruptChunkError
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def key_of(chunk: ChunkKV) -> str:
    return chunk_key(chunk.origin, chunk.token_ids)


def read(data: bytes, key: str) -> tuple[EntryHeader, list[LayerKV]]:
    """Header and all layers of an entry."""
    backend = MemoryBackend()
    backend.write(key, data)
    with backend.open(key) as reader:
        header = read_header(reader, key)
        return header, [read_layer(reader, header, i) for i in range(LAYERS)]


def same(left: list[LayerKV], right: Any) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.float(), b.float()) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


def refused_or_right(data: bytes, chunk: ChunkKV) -> bool:
    """True: refused as corrupt. False: read, and exactly what was written. Anything else is an error."""
    try:
        header, layers = read(data, key_of(chunk))
    except CorruptChunkError:
        return True
    assert header.origin == chunk.origin
    assert np.array_equal(header.token_ids, chunk.token_ids)
    assert same(layers, chunk.layers)
    assert header.staleness is not None and np.array_equal(header.staleness, chunk.staleness)
    return False


# --- what is written comes back ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2, 16, 8), (2, 1, 1, 4), (120, 3, 17, 6)])
def test_round_trip_is_exact(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    num_layers, num_heads, num_tokens, head_dim = shape
    chunk = random_chunk(
        1, dtype=dtype, num_layers=num_layers, num_heads=num_heads, num_tokens=num_tokens, head_dim=head_dim
    )
    backend = MemoryBackend()
    backend.write(key_of(chunk), encode_entry(chunk, dtype))
    with backend.open(key_of(chunk)) as reader:
        header = read_header(reader, key_of(chunk))
        layers = [read_layer(reader, header, i) for i in range(num_layers)]
        with pytest.raises(CorruptChunkError):
            read_layer(reader, header, num_layers)
    assert header.origin == ORIGIN
    assert header.dtype == dtype
    assert header.shape == (2, num_heads, num_tokens, head_dim)
    assert header.token_ids.dtype == np.int32
    assert np.array_equal(header.token_ids, chunk.token_ids)
    assert {t.dtype for layer in layers for t in layer} == {dtype}
    assert {t.shape for layer in layers for t in layer} == {(num_heads, num_tokens, head_dim)}
    assert same(layers, chunk.layers)


def test_staleness_may_be_unknown() -> None:
    chunk = random_chunk()._replace(staleness=None)
    header, layers = read(encode_entry(chunk, torch.float32), key_of(chunk))
    assert header.staleness is None
    assert same(layers, chunk.layers)


def test_extreme_values_that_the_dtype_has_come_back() -> None:
    values = torch.tensor([65504.0, -65504.0, 2.0**-24, -0.0, 6.1e-5, 0.0, 1.0, -1.0]).half().float()
    chunk = random_chunk()
    chunk = chunk._replace(layers=[LayerKV(values.expand(HEADS, TOKENS, 8), layer.values) for layer in chunk.layers])
    header, layers = read(encode_entry(chunk, torch.float16), key_of(chunk))
    assert header.dtype == torch.float16
    assert torch.equal(layers[0].keys.float(), chunk.layers[0].keys)
    assert torch.signbit(layers[0].keys[0, 0, 3])


def test_layers_may_be_views() -> None:
    chunk = random_chunk()
    wide = [LayerKV(*(torch.cat([t, t], dim=1)[:, TOKENS:] for t in layer)) for layer in chunk.layers]
    turned = [LayerKV(*(t.mT.contiguous().mT for t in layer)) for layer in chunk.layers]
    for layers in (wide, turned):
        assert refused_or_right(encode_entry(chunk._replace(layers=layers), torch.float32), chunk) is False


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_refused(bad: float, dtype: torch.dtype, side: int) -> None:
    chunk = random_chunk()
    chunk.layers[-1][side][1, 3, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        encode_entry(chunk, dtype)


def test_float16_gives_way_to_bfloat16_where_it_would_overflow() -> None:
    chunk = random_chunk(dtype=torch.bfloat16)
    chunk.layers[1].keys[0, 0, 0] = 2.0**17
    header, layers = read(encode_entry(chunk, torch.float16), key_of(chunk))
    assert header.dtype == torch.bfloat16
    assert same(layers, chunk.layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_would_become_infinite_is_refused(dtype: torch.dtype) -> None:
    chunk = random_chunk()
    chunk.layers[0].values[0, 0, 0] = torch.finfo(torch.float32).max
    with pytest.raises(ValueError, match="too large"):
        encode_entry(chunk, dtype)
    assert not refused_or_right(encode_entry(chunk, torch.float32), chunk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_safetensors_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    chunk = random_chunk(dtype=dtype)
    (tmp_path / "x.safetensors").write_bytes(encode_entry(chunk, dtype))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["chunk_staleness", "layer.000", "layer.001", "layer.002", "token_ids"]
        assert file.get_tensor("token_ids").tolist() == chunk.token_ids.tolist()
        layer = file.get_tensor("layer.001")
        assert file.metadata()["format"] == FORMAT
    assert layer.dtype == dtype
    assert torch.equal(layer.float(), torch.stack(list(chunk.layers[1])))


# --- what is damaged is refused ---


@pytest.fixture(scope="module")
def chunk() -> ChunkKV:
    return random_chunk(7, dtype=torch.float16)


@pytest.fixture(scope="module")
def data(chunk: ChunkKV) -> bytes:
    return encode_entry(chunk, torch.float16)


def test_the_undamaged_entry_is_read(chunk: ChunkKV, data: bytes) -> None:
    assert refused_or_right(data, chunk) is False


def _flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_every_flipped_bit_of_the_header_is_harmless(chunk: ChunkKV, data: bytes) -> None:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    # A bit of e.g. the padding may turn it into other white space: the entry is then still what was written.
    refused = [refused_or_right(_flipped(data, bit), chunk) for bit in range(8 * end)]
    assert refused.count(False) <= 16
    assert all(refused[:64])


def test_every_flipped_bit_of_the_token_ids_is_found(chunk: ChunkKV, data: bytes) -> None:
    header, rest = split(data)
    start, end = header["token_ids"]["data_offsets"]
    first = len(data) - len(rest)
    for bit in range(8 * (first + start), 8 * (first + end), 3):
        assert refused_or_right(_flipped(data, bit), chunk), bit


@pytest.mark.parametrize("layer", range(LAYERS))
def test_flipped_bits_of_a_layer_are_found(chunk: ChunkKV, data: bytes, layer: int) -> None:
    header, rest = split(data)
    start, end = header[f"layer.{layer:03d}"]["data_offsets"]
    first = len(data) - len(rest)
    bits = [8 * (first + start), 8 * (first + end) - 1, *range(8 * (first + start), 8 * (first + end), 331)]
    for bit in bits:
        backend = MemoryBackend()
        backend.write(key_of(chunk), _flipped(data, bit))
        with backend.open(key_of(chunk)) as reader:
            found = read_header(reader, key_of(chunk))
            for i in range(LAYERS):
                if i == layer:
                    with pytest.raises(CorruptChunkError, match=f"layer {layer}"):
                        read_layer(reader, found, i)
                else:
                    read_layer(reader, found, i)


def test_every_truncation_is_found(chunk: ChunkKV, data: bytes, tmp_path: Path) -> None:
    header, rest = split(data)
    first = len(data) - len(rest)
    edges = [0, 1, 7, 8, 9, first, *(first + e for t in header.values() for e in t.get("data_offsets", ()))]
    cuts = {c for e in edges for c in (e - 1, e, e + 1)} | set(range(0, len(data), 97)) | set(range(first))
    cuts = {c for c in cuts if 0 <= c < len(data)}
    assert len(cuts) > 300
    assert [cut for cut in sorted(cuts) if not refused_or_right(data[:cut], chunk)] == []
    disk = DiskBackend(tmp_path)
    for cut in sorted(cuts)[::40]:
        disk.write(key_of(chunk), data[:cut])
        with disk.open(key_of(chunk)) as reader, pytest.raises(CorruptChunkError):
            found = read_header(reader, key_of(chunk))
            for i in range(LAYERS):
                read_layer(reader, found, i)


def test_another_key_is_refused(chunk: ChunkKV, data: bytes) -> None:
    other = random_chunk(8)
    with pytest.raises(CorruptChunkError, match="another key"):
        read(data, key_of(other))


Header = dict[str, Any]


def _lie(change: Callable[[Header], None]) -> Callable[[bytes], bytes]:
    def tell(data: bytes) -> bytes:
        header, rest = split(data)
        change(header)
        return join(header, rest)

    return tell


def _set(*path: str, to: Any) -> Callable[[bytes], bytes]:
    def change(header: Header) -> None:
        target = header
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = to

    return _lie(change)


def _all_layers(**fields: Any) -> Callable[[bytes], bytes]:
    def change(header: Header) -> None:
        for name in [n for n in header if n.startswith("layer.")]:
            header[name].update(fields)

    return _lie(change)


def _swap_layers(header: Header) -> None:
    header["layer.000"], header["layer.001"] = header["layer.001"], header["layer.000"]


def _swap_layers_and_checksums(header: Header) -> None:
    _swap_layers(header)
    sums = json.loads(header["__metadata__"]["checksums"])
    header["__metadata__"]["checksums"] = json.dumps([sums[1], sums[0], *sums[2:]])


def _drop_last_layer(header: Header) -> None:
    del header[f"layer.{LAYERS - 1:03d}"]
    sums = json.loads(header["__metadata__"]["checksums"])
    header["__metadata__"]["checksums"] = json.dumps(sums[:-1])


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a stored entry was run",))


LIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "header length 2**62": lambda data: struct.pack("<Q", 2**62) + data[8:],
    "header length 2**64-1": lambda data: b"\xff" * 8 + data[8:],
    "header length 0": lambda data: bytes(8) + data[8:],
    "header over the cap": lambda data: join(
        json.dumps(split(data)[0]).encode() + b" " * MAX_HEADER_BYTES, split(data)[1]
    ),
    "deep lists": lambda data: join(b"[" * (MAX_HEADER_BYTES - 16), split(data)[1]),
    "deep objects": lambda data: join(b'{"a":' * 150_000, split(data)[1]),
    "deep metadata": _set("__metadata__", "origin", to="[" * 100_000),
    "deep origin": _set("__metadata__", "origin", to='{"fingerprint":' + "[" * 20_000 + "]" * 20_000 + "}"),
    "no JSON": lambda data: join(b"\x00\xff" * 100, split(data)[1]),
    "not UTF-8": lambda data: join(b'{"__metadata__":"\xff\xfe"}', split(data)[1]),
    "a list": lambda data: join([1, 2], split(data)[1]),
    "null": lambda data: join(None, split(data)[1]),
    "no metadata": _lie(lambda h: h.pop("__metadata__")),
    "metadata of another kind": _set("__metadata__", to=[1]),
    "metadata null": _set("__metadata__", to=None),
    "other format": _set("__metadata__", "format", to="rag_blend.kv/1"),
    "no token ids": _lie(lambda h: h.pop("token_ids")),
    "token ids as floats": _set("token_ids", "dtype", to="F32"),
    "token ids of another length": _set("token_ids", "data_offsets", to=[0, 4]),
    "token ids outside": _set("token_ids", to={"dtype": "I32", "shape": [2**60], "data_offsets": [0, 2**62]}),
    "token ids of odd length": _set("token_ids", to={"dtype": "I32", "shape": [1], "data_offsets": [0, 7]}),
    "staleness without a checksum": _lie(lambda h: h["__metadata__"].pop("chunk_staleness")),
    "a checksum without staleness": _lie(lambda h: h.pop("chunk_staleness")),
    "staleness of another chunk": _set("__metadata__", "chunk_staleness", to="0" * 32),
    "staleness as layers": _set("chunk_staleness", "dtype", to="F32"),
    "token ids negative": _set("token_ids", to={"dtype": "I32", "shape": [-1], "data_offsets": [0, -4]}),
    "origin null": _set("__metadata__", "origin", to="null"),
    "origin with more": _set("__metadata__", "origin", to='{"fingerprint":1,"namespace":2,"head":3,"prime":4,"x":5}'),
    "origin of somebody else": _set(
        "__metadata__", "origin", to='{"fingerprint":"f","namespace":"n","head":"h","prime":"p"}'
    ),
    "no checksums": _set("__metadata__", "checksums", to="[]"),
    "one checksum less": _set("__metadata__", "checksums", to='["a","b"]'),
    "checksums of another kind": _set("__metadata__", "checksums", to="[1,2,3]"),
    "checksums no list": _set("__metadata__", "checksums", to="7"),
    "checksums as an object": _set("__metadata__", "checksums", to='{"a":1,"b":2,"c":3}'),
    "a layer more": _set("layer.999", to={"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}),
    "the last layer dropped": _lie(_drop_last_layer),
    "layer of another kind": _set("layer.000", to=[1, 2, 3]),
    "layer null": _set("layer.000", to=None),
    "layer of another shape": _set("layer.001", "shape", to=[2, HEADS, HEAD_DIM, TOKENS]),
    "all of another dtype": _all_layers(dtype="BF16"),
    "all of a wider dtype": _all_layers(dtype="F32"),
    "all of an unknown dtype": _all_layers(dtype="F8_E4M3"),
    "all of a dtype that is no name": _all_layers(dtype=["F16"]),
    "heads and dims swapped": _all_layers(shape=[2, HEAD_DIM, TOKENS, HEADS]),
    "one head": _all_layers(shape=[2, 1, TOKENS, HEADS * HEAD_DIM]),
    "huge shape": _all_layers(shape=[2, 2**40, TOKENS, 2**40]),
    "infinite shape": lambda data: join(
        json.dumps(split(data)[0]).replace(f"[2, {HEADS}, {TOKENS}, {HEAD_DIM}]", "[2, 1e999, 24, 8]").encode(),
        split(data)[1],
    ),
    "NaN in the shape": _all_layers(shape=[2, float("nan"), TOKENS, HEAD_DIM]),
    "negative shape": _all_layers(shape=[2, -HEADS, TOKENS, -HEAD_DIM]),
    "zero shape": _all_layers(shape=[2, 0, TOKENS, HEAD_DIM]),
    "flat shape": _all_layers(shape=[2 * HEADS * TOKENS * HEAD_DIM]),
    "shape as text": _all_layers(shape="2248"),
    "shape null": _all_layers(shape=None),
    "all at one place": _all_layers(data_offsets=[96, 96 + 2 * 2 * HEADS * TOKENS * HEAD_DIM]),
    "offsets outside": _all_layers(data_offsets=[2**62, 2**62 + 2 * 2 * HEADS * TOKENS * HEAD_DIM]),
    "offsets reversed": _all_layers(data_offsets=[1632, 96]),
    "offsets negative": _all_layers(data_offsets=[-8, 1528]),
    "offsets as floats": _all_layers(data_offsets=[96.0, 1632.0]),
    "offsets null": _all_layers(data_offsets=None),
    "offsets of three": _all_layers(data_offsets=[1, 2, 3]),
    "layers swapped": _lie(_swap_layers),
    "layers swapped with their checksums": _lie(_swap_layers_and_checksums),
    "a pickle": lambda data: pickle.dumps(_Payload()),
    "a pickle as header": lambda data: join(pickle.dumps(_Payload()), split(data)[1]),
    "digits without end": lambda data: join(b'{"__metadata__":' + b"9" * 500_000 + b"}", split(data)[1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_entry_is_refused(chunk: ChunkKV, data: bytes, lie: str) -> None:
    told = LIES[lie](data)
    assert told != data
    assert refused_or_right(told, chunk) is True


BIG = 2 * 2**20 * TOKENS * HEAD_DIM
BIG_LIES = {
    **{name: LIES[name] for name in ("header length 2**62", "huge shape", "offsets outside", "a pickle")},
    "a GiB of token ids": _set("token_ids", to={"dtype": "I32", "shape": [2**28], "data_offsets": [0, 2**30]}),
    "large layers": _all_layers(shape=[2, 2**20, TOKENS, HEAD_DIM], data_offsets=[96, 96 + 2 * BIG]),
}


@pytest.mark.parametrize("lie", BIG_LIES)
def test_a_lie_makes_nobody_allocate(chunk: ChunkKV, data: bytes, lie: str, tmp_path: Path) -> None:
    disk = DiskBackend(tmp_path)
    disk.write(key_of(chunk), BIG_LIES[lie](data))
    tracemalloc.start()
    try:
        with disk.open(key_of(chunk)) as reader, pytest.raises(CorruptChunkError):
            read_header(reader, key_of(chunk))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_is_not_believed_before_all_layers_are_there(chunk: ChunkKV, data: bytes) -> None:
    backend = MemoryBackend()
    backend.write(key_of(chunk), data[:-1])
    with backend.open(key_of(chunk)) as reader, pytest.raises(CorruptChunkError, match="outside"):
        read_header(reader, key_of(chunk))


def test_rewriting_a_header_faithfully_changes_nothing(chunk: ChunkKV, data: bytes) -> None:
    """So the lies above are refused for what they say, not for how they are put together."""
    assert refused_or_right(_lie(lambda h: None)(data), chunk) is False


def test_random_damage(chunk: ChunkKV, data: bytes) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = np.frombuffer(data, np.uint8).copy()
        start = int(rng.integers(0, len(data)))
        end = start + int(rng.integers(1, 600))
        damaged[start:end] = rng.integers(0, 256, len(damaged[start:end]))
        if damaged.tobytes() != data:
            assert refused_or_right(damaged.tobytes(), chunk) is True
