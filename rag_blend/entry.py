"""One chunk's cache as the bytes of one safetensors file.

The file holds ``token_ids`` (int32), possibly ``chunk_staleness`` (float16, see `ChunkKV`), and one tensor per layer,
``layer.000`` …, of shape (2, num_kv_heads, num_tokens, head_dim): keys before RoPE, then values. So a layer is one
contiguous read. The metadata name the origin and carry one xxh3 checksum per layer, over its number, dtype, shape and
bytes, and one of the staleness; the entry's key is a digest of origin and token ids. So a header that says something
else than was written is found out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save

from rag_blend.chunk import FORMAT, ChunkKV, ChunkOrigin, LayerKV, chunk_key
from rag_blend.errors import CorruptChunkError
from rag_blend.storage import EntryReader

MAX_HEADER_BYTES = 1 << 20
_FIRST_READ = 1 << 14  # enough for the header of most models: one read instead of two
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_IDS = "token_ids"
_STALENESS = "chunk_staleness"  # safetensors sorts by name: so it lies beside header and ids, in front of the layers


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What an entry says about itself, checked against its key and its size.

    Attributes:
        origin: What the cache was computed with.
        token_ids: The chunk's ids, int32, shape (num_tokens,).
        shape: Of every layer: (2, num_kv_heads, num_tokens, head_dim).
        dtype: Of every layer.
        offsets: First byte of each layer in the file.
        checksums: xxh3_128 of each layer's number, dtype, shape and bytes.
        staleness: See `ChunkKV.staleness`.
    """

    origin: ChunkOrigin
    token_ids: np.ndarray
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    checksums: tuple[str, ...]
    staleness: np.ndarray | None = None

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


def encode_entry(chunk: ChunkKV, dtype: torch.dtype) -> bytes:
    """Serialise a chunk.

    Args:
        chunk: The cache; keys and values of shape (num_kv_heads, num_tokens, head_dim).
        dtype: Stored dtype. float16 gives way to bfloat16 where a value would overflow.

    Raises:
        ValueError: A key or value is NaN or infinite, or too large even for bfloat16.
    """
    layers = [torch.stack([kv.keys, kv.values]).cpu() for kv in chunk.layers]
    stored = [layer.to(dtype) for layer in layers]
    if not all(_is_finite(layer) for layer in stored):
        if not all(_is_finite(layer) for layer in layers):
            raise ValueError("keys or values are not finite")
        stored = [layer.to(torch.bfloat16) for layer in layers]
        if not all(_is_finite(layer) for layer in stored):
            raise ValueError("keys or values are too large to be stored")
    stored = [layer.contiguous() for layer in stored]
    metadata = {
        "format": FORMAT,
        "origin": json.dumps(asdict(chunk.origin)),
        "checksums": json.dumps([_checksum(i, layer) for i, layer in enumerate(stored)]),
    }
    tensors = {f"layer.{i:03d}": layer for i, layer in enumerate(stored)}
    tensors[_IDS] = torch.from_numpy(np.array(chunk.token_ids, dtype=np.int32))
    if chunk.staleness is not None:
        staleness = np.array(chunk.staleness, dtype=np.float16)
        tensors[_STALENESS] = torch.from_numpy(staleness)
        metadata[_STALENESS] = xxhash.xxh3_128_hexdigest(staleness.tobytes())
    return save(tensors, metadata)


def read_header(reader: EntryReader, key: str) -> EntryHeader:
    """Read and check an entry's header and token ids.

    Raises:
        CorruptChunkError: It is not a whole entry of this format, or it does not belong under `key`.
        OSError: The medium does not answer.
    """
    try:
        return _parse_header(reader, key)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptChunkError(f"entry {key[:12]}: {error}") from error


def read_layer(reader: EntryReader, header: EntryHeader, layer_idx: int) -> LayerKV:
    """Read one layer; the tensors are in the stored dtype and must not be written to.

    Raises:
        CorruptChunkError: The bytes do not match their checksum.
        OSError: The medium does not answer.
    """
    if layer_idx >= len(header.offsets):
        raise CorruptChunkError(f"layer {layer_idx} of an entry of {len(header.offsets)}")
    data = reader.read(header.offsets[layer_idx], header.layer_bytes)
    layer = torch.from_numpy(data).view(header.dtype).view(header.shape)
    if _checksum(layer_idx, layer) != header.checksums[layer_idx]:
        raise CorruptChunkError(f"layer {layer_idx} does not match its checksum")
    keys, values = layer
    return LayerKV(keys, values)


def _checksum(layer_idx: int, layer: torch.Tensor) -> str:
    digest = xxhash.xxh3_128(f"{layer_idx} {layer.dtype} {tuple(layer.shape)}".encode())
    digest.update(layer.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _parse_header(reader: EntryReader, key: str) -> EntryHeader:
    first = reader.read(0, min(_FIRST_READ, reader.size)).tobytes()
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, reader.size - 8):
        raise ValueError(f"header of {length} bytes in an entry of {reader.size}")
    if 8 + length > len(first):
        first = reader.read(0, 8 + length).tobytes()
    fields: dict[str, Any] = json.loads(first[8 : 8 + length])
    metadata = fields.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
    ids = _read_vector(reader, fields.pop(_IDS), 8 + length, "I32").view("<i4")
    staleness = _read_staleness(reader, fields.pop(_STALENESS, None), 8 + length, metadata.get(_STALENESS), len(ids))
    origin = ChunkOrigin(**json.loads(metadata["origin"]))
    if chunk_key(origin, ids) != key:
        raise ValueError("its contents belong under another key")
    checksums = tuple(json.loads(metadata["checksums"]))
    layers = [fields[f"layer.{i:03d}"] for i in range(len(checksums))]
    if not layers or len(layers) != len(fields):
        raise ValueError("layers and checksums differ in number")
    shape = _common_shape(layers, len(ids))
    header = EntryHeader(
        origin=origin,
        token_ids=ids,
        shape=shape,
        dtype=_DTYPES[layers[0]["dtype"]],
        offsets=tuple(8 + length + _span(layer)[0] for layer in layers),
        checksums=checksums,
        staleness=staleness,
    )
    for layer in layers:
        start, end = _span(layer)
        if end - start != header.layer_bytes or 8 + length + end > reader.size:
            raise ValueError("a layer lies outside the entry")
    return header


def _read_vector(reader: EntryReader, field: dict[str, Any], data_start: int, dtype: str) -> np.ndarray:
    """The bytes of a one-dimensional tensor."""
    start, end = _span(field)
    itemsize = {"I32": 4, "F16": 2}[dtype]
    if field["dtype"] != dtype or field["shape"] != [(end - start) // itemsize] or data_start + end > reader.size:
        raise ValueError(f"a vector of {dtype} is malformed")
    return reader.read(data_start + start, end - start)


def _read_staleness(
    reader: EntryReader, field: dict[str, Any] | None, data_start: int, checksum: Any, num_tokens: int
) -> np.ndarray | None:
    if field is None and checksum is None:
        return None
    data = _read_vector(reader, field or {}, data_start, "F16")
    if xxhash.xxh3_128_hexdigest(data.tobytes()) != checksum or len(data) != 2 * num_tokens:
        raise ValueError("staleness does not match its checksum")
    return data.view("<f2")


def _span(field: dict[str, Any]) -> tuple[int, int]:
    start, end = field["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError(f"bad offsets {field['data_offsets']!r}")
    return start, end


def _common_shape(layers: list[dict[str, Any]], num_tokens: int) -> tuple[int, int, int, int]:
    shape, dtype = layers[0]["shape"], layers[0]["dtype"]
    if any(layer["shape"] != shape or layer["dtype"] != dtype for layer in layers):
        raise ValueError("layers differ in shape or dtype")
    two, heads, tokens, head_dim = (int(size) for size in shape)
    if two != 2 or tokens != num_tokens or min(heads, tokens, head_dim) < 1:
        raise ValueError(f"layers of shape {shape} for {num_tokens} tokens")
    return two, heads, tokens, head_dim
