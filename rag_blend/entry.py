"""One chunk's cache as the bytes of one safetensors file.

The file holds ``token_ids`` (int32), possibly ``chunk_staleness`` (float16, see `ChunkKV`), and one tensor per layer,
``layer.000`` …, of shape (2, num_kv_heads, num_tokens, head_dim): keys before RoPE, then values. So a layer is one
contiguous read. The metadata name the origin and carry one xxh3 checksum per layer, over its number, dtype, shape and
bytes, and one of the staleness; the entry's key is a digest of origin and token ids. So a header that says something
else than was written is found out.

With another codec than ``raw`` the metadata also name the codec (the checksums then cover its name, too), and dtype
and shape of what the layers decode to; a layer is the codec's bytes (uint8). The key says nothing of the codec: it
names what was cached, and any way of writing that down is good enough to read. So a store may hold entries of several
codecs, an engine uses them all, and changing its codec loses nothing and changes nothing that is stored already. An
entry whose codec is unknown here, because a newer version wrote it or a library is missing, is not ours to judge: it is
a miss, and stays where it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors.torch import save

from rag_blend.chunk import FORMAT, ChunkKV, ChunkOrigin, LayerKV, chunk_key
from rag_blend.codecs import Codec, codec_of
from rag_blend.codecs.base import Shape
from rag_blend.codecs.raw import RawCodec
from rag_blend.errors import CorruptChunkError, FingerprintMismatchError
from rag_blend.storage import EntryReader
from rag_blend.storage.base import Bytes

MAX_HEADER_BYTES = 1 << 20
_FIRST_READ = 1 << 14  # enough for the header of most models: one read instead of two
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_IDS = "token_ids"
_STALENESS = "chunk_staleness"  # safetensors sorts by name: so it lies beside header and ids, in front of the layers
_RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What an entry says about itself, checked against its key and its size.

    Attributes:
        origin: What the cache was computed with.
        token_ids: The chunk's ids, int32, shape (num_tokens,).
        shape: Of every layer: (2, num_kv_heads, num_tokens, head_dim).
        dtype: Of every layer, as it is read.
        codec: How the layers are written down.
        offsets: First byte of each layer in the file.
        lengths: How many bytes each layer takes there.
        checksums: xxh3_128 of each layer's number, codec, dtype, shape and bytes.
        staleness: See `ChunkKV.staleness`.
    """

    origin: ChunkOrigin
    token_ids: np.ndarray
    shape: Shape
    dtype: torch.dtype
    codec: Codec
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    checksums: tuple[str, ...]
    staleness: np.ndarray | None = None


def encode_entry(chunk: ChunkKV, dtype: torch.dtype, codec: Codec = _RAW) -> bytes:
    """Serialise a chunk.

    Args:
        chunk: The cache; keys and values of shape (num_kv_heads, num_tokens, head_dim).
        dtype: What lossless codecs store. float16 gives way to bfloat16 where a value would overflow.
        codec: How layers are written down. A lossy one gives way to `raw` for what was cached behind nothing, which is
            a prompt's head: all later tokens attend to its first ones, so that their errors are everybody's, and it is
            short.

    Raises:
        ValueError: A key or value is NaN or infinite, or too large even for bfloat16, or for the codec.
    """
    if not codec.lossless and chunk.origin.is_head:
        codec = _RAW
    stored = _in_dtype(chunk.layers, dtype if codec.lossless else torch.float32)
    encoded = [codec.encode(layer) for layer in stored]
    shape, kept = tuple(stored[0].shape), stored[0].dtype
    sums = [_checksum(i, codec, kept, shape, data) for i, data in enumerate(encoded)]
    metadata = {
        "format": FORMAT,
        "origin": json.dumps(asdict(chunk.origin)),
        "checksums": json.dumps(sums),
    }
    if codec.name == _RAW.name:  # then the file is one that says all this by itself
        encoded = stored
    else:
        metadata["codec"] = codec.name
        metadata["layers"] = json.dumps({"dtype": _NAMES[kept], "shape": shape})
    tensors = {f"layer.{i:03d}": data for i, data in enumerate(encoded)}
    tensors[_IDS] = torch.from_numpy(np.array(chunk.token_ids, dtype=np.int32))
    if chunk.staleness is not None:
        staleness = np.array(chunk.staleness, dtype=np.float16)
        tensors[_STALENESS] = torch.from_numpy(staleness)
        metadata[_STALENESS] = xxhash.xxh3_128_hexdigest(staleness.tobytes())
    return save(tensors, metadata)


def read_header(reader: EntryReader, key: str, own: Codec = _RAW) -> EntryHeader:
    """Read and check an entry's header and token ids.

    Args:
        reader: The entry.
        key: Its key.
        own: A codec that the entry may have besides those that `codec_of` knows.

    Raises:
        CorruptChunkError: It is not a whole entry of this format, or it does not belong under `key`.
        FingerprintMismatchError: Nothing here reads its codec.
        OSError: The medium does not answer.
    """
    try:
        return _parse_header(reader, key, own)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptChunkError(f"entry {key[:12]}: {error}") from error


def read_layer(reader: EntryReader, header: EntryHeader, layer_idx: int) -> LayerKV:
    """Read one layer; the tensors are in the header's dtype and must not be written to.

    Raises:
        CorruptChunkError: The bytes do not match their checksum, or are none that the codec writes.
        OSError: The medium does not answer.
    """
    if layer_idx >= len(header.offsets):
        raise CorruptChunkError(f"layer {layer_idx} of an entry of {len(header.offsets)}")
    data = torch.from_numpy(reader.read(header.offsets[layer_idx], header.lengths[layer_idx]))
    if _checksum(layer_idx, header.codec, header.dtype, header.shape, data) != header.checksums[layer_idx]:
        raise CorruptChunkError(f"layer {layer_idx} does not match its checksum")
    try:
        keys, values = header.codec.decode(data, header.shape, header.dtype)
    except ValueError as error:
        raise CorruptChunkError(f"layer {layer_idx}: {error}") from error
    return LayerKV(keys, values)


def _in_dtype(layers: Sequence[LayerKV], dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous layers on the CPU, (2, num_kv_heads, num_tokens, head_dim), in this dtype or else in bfloat16."""
    given = [torch.stack([kv.keys, kv.values]).cpu() for kv in layers]
    for wanted in (dtype, torch.bfloat16):
        stored = [layer.to(wanted).contiguous() for layer in given]
        if all(_is_finite(layer) for layer in stored):
            return stored
        if not all(_is_finite(layer) for layer in given):
            raise ValueError("keys or values are not finite")
    raise ValueError("keys or values are too large to be stored")


def _checksum(layer_idx: int, codec: Codec, dtype: torch.dtype, shape: tuple[int, ...], data: torch.Tensor) -> str:
    name = "" if codec.name == _RAW.name else f"{codec.name} "
    digest = xxhash.xxh3_128(f"{layer_idx} {name}{dtype} {shape}".encode())
    digest.update(data.numpy().data)
    return digest.hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _parse_header(reader: EntryReader, key: str, own: Codec) -> EntryHeader:
    first = reader.read(0, min(_FIRST_READ, reader.size))
    length = int.from_bytes(first[:8].tobytes(), "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, reader.size - 8):
        raise ValueError(f"header of {length} bytes in an entry of {reader.size}")
    if 8 + length > len(first):
        first = reader.read(0, 8 + length)
    fields: dict[str, Any] = json.loads(first[8 : 8 + length].tobytes())
    metadata = fields.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
    front = _Front(first, reader)
    ids = _read_vector(front, fields.pop(_IDS), 8 + length, "I32").view("<i4")
    staleness = _read_staleness(front, fields.pop(_STALENESS, None), 8 + length, metadata.get(_STALENESS), len(ids))
    origin = ChunkOrigin(**json.loads(metadata["origin"]))
    if chunk_key(origin, ids) != key:
        raise ValueError("its contents belong under another key")
    codec = _codec_named(metadata.get("codec", _RAW.name), own)
    checksums = tuple(json.loads(metadata["checksums"]))
    layers = [fields[f"layer.{i:03d}"] for i in range(len(checksums))]
    if not layers or len(layers) != len(fields):
        raise ValueError("layers and checksums differ in number")
    shape, dtype = _layers_are(layers, codec, metadata, len(ids))
    spans = [_span(layer) for layer in layers]
    sizes = codec.sizes(shape, dtype)
    if any(end - start not in sizes or 8 + length + end > reader.size for start, end in spans):
        raise ValueError("a layer lies outside the entry, or is not as long as it must be")
    return EntryHeader(
        origin=origin,
        token_ids=ids,
        shape=shape,
        dtype=dtype,
        codec=codec,
        offsets=tuple(8 + length + start for start, _ in spans),
        lengths=tuple(end - start for start, end in spans),
        checksums=checksums,
        staleness=staleness,
    )


def _codec_named(name: str, own: Codec) -> Codec:
    if name == own.name:
        return own
    if not name.isidentifier():
        raise ValueError(f"{name!r} names no codec")
    try:
        return codec_of(name)
    except (ValueError, ImportError) as error:
        raise FingerprintMismatchError(str(error)) from error


class _Front(NamedTuple):
    """An entry whose first bytes have been read: what lies among them costs no other way to its medium."""

    first: Bytes
    reader: EntryReader

    def read(self, offset: int, length: int) -> Bytes:
        """See `EntryReader.read`."""
        if offset + length > len(self.first):
            return self.reader.read(offset, length)
        return self.first[offset : offset + length].copy()  # or the rest would stay in memory with it


def _read_vector(entry: _Front, field: dict[str, Any], data_start: int, dtype: str) -> np.ndarray:
    """The bytes of a one-dimensional tensor."""
    start, end = _span(field)
    itemsize = {"I32": 4, "F16": 2}[dtype]
    if field["dtype"] != dtype or field["shape"] != [(end - start) // itemsize] or data_start + end > entry.reader.size:
        raise ValueError(f"a vector of {dtype} is malformed")
    return entry.read(data_start + start, end - start)


def _read_staleness(
    entry: _Front, field: dict[str, Any] | None, data_start: int, checksum: Any, num_tokens: int
) -> np.ndarray | None:
    if field is None and checksum is None:
        return None
    data = _read_vector(entry, field or {}, data_start, "F16")
    if xxhash.xxh3_128_hexdigest(data.tobytes()) != checksum or len(data) != 2 * num_tokens:
        raise ValueError("staleness does not match its checksum")
    return data.view("<f2")


def _span(field: dict[str, Any]) -> tuple[int, int]:
    start, end = field["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError(f"bad offsets {field['data_offsets']!r}")
    return start, end


def _layers_are(
    layers: list[dict[str, Any]], codec: Codec, metadata: dict[str, Any], num_tokens: int
) -> tuple[Shape, torch.dtype]:
    """Shape and dtype that all layers have when they are read."""
    if codec.name == _RAW.name:
        described = layers[0]
        alike = all(layer["shape"] == described["shape"] and layer["dtype"] == described["dtype"] for layer in layers)
    else:
        described = json.loads(metadata["layers"])
        alike = all(layer["dtype"] == "U8" for layer in layers)
    if not alike:
        raise ValueError("layers differ in shape or dtype")
    two, heads, tokens, head_dim = (int(size) for size in described["shape"])
    if two != 2 or tokens != num_tokens or min(heads, tokens, head_dim) < 1:
        raise ValueError(f"layers of shape {described['shape']} for {num_tokens} tokens")
    return (two, heads, tokens, head_dim), _DTYPES[described["dtype"]]
