"""What an operator does with a store, without its model: check it, erase from it, and carry it elsewhere."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import IO, BinaryIO

import numpy as np
import torch

from rag_blend.entry import EntryHeader, read_header, read_layer
from rag_blend.errors import ChunkNotFoundError, CorruptChunkError, FingerprintMismatchError
from rag_blend.label import label_of
from rag_blend.sample import samples_drawn_from
from rag_blend.storage import EntryReader, StorageBackend
from rag_blend.storage.memory import BytesReader
from rag_blend.store import KVStore

Step = Callable[[], object]  # called after each entry, for a progress bar

_ENTRY = re.compile(r"entries/([0-9a-f]{64})\.safetensors")
_RECORD = re.compile(r"records/([0-9a-f]{64})\.json")
_DOCUMENTS = "documents.jsonl"
_LARGEST_RECORD = 64 << 20


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        entries: Entries that were looked at.
        bytes: Their size together.
        damaged: What is wrong, by key.
        unreadable: What the medium said, by key: nothing is known about these.
        unknown: Entries whose codec cannot be read here; they are left alone.
    """

    entries: int = 0
    bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unknown: int = 0


def verify(backend: StorageBackend, set_aside: bool = True, step: Step = lambda: None) -> VerifyReport:
    """Read every entry to its end and compare all checksums.

    Args:
        backend: The store.
        set_aside: Take damaged entries out of the way, so that they are computed anew.
        step: Called after each entry.

    Raises:
        OSError: The entries cannot be listed.
    """
    report = VerifyReport()
    for key in list(backend.keys()):
        try:
            with backend.open(key) as reader:
                report.bytes += reader.size
                _read_all(reader, key)
        except ChunkNotFoundError:
            continue  # somebody has deleted it meanwhile
        except CorruptChunkError as error:
            report.damaged[key] = str(error)
            if set_aside:
                backend.quarantine(key)
        except FingerprintMismatchError:
            report.unknown += 1
        except OSError as error:
            report.unreadable[key] = str(error)
        report.entries += 1
        step()
    return report


@dataclass(frozen=True, slots=True)
class ErasureReceipt:
    """What `forget` deleted.

    Attributes:
        documents: The documents.
        keys: The entries, sorted.
        samples: Priming texts that were drawn from one of the documents; what was primed with them is among the keys.
    """

    documents: tuple[str, ...]
    keys: tuple[str, ...]
    samples: int


def forget(backend: StorageBackend, documents: AbstractSet[str], namespace: str = "default") -> ErasureReceipt:
    """Erase what is stored for documents of a tenant, of whatever model; see `BlendEngine.forget`.

    Raises:
        OSError: The store refused; call again to finish.
    """
    store = KVStore(backend, fingerprint="", namespace=namespace, kv_dtype=torch.float16)
    samples = samples_drawn_from(store.backend, documents, namespace)
    keys = store.forget(documents, samples.primes)
    for name in samples.records:
        backend.delete_record(name)
    return ErasureReceipt(tuple(sorted(documents)), tuple(keys), len(samples.records))


def entries_of(backend: StorageBackend, documents: AbstractSet[str], namespace: str = "default") -> set[str]:
    """Keys of what is stored for documents of a tenant and for no others, of whatever model.

    Raises:
        OSError: The store does not answer.
    """
    return KVStore(backend, fingerprint="", namespace=namespace, kv_dtype=torch.float16).entries_of(documents)


def export(backend: StorageBackend, target: BinaryIO, step: Step = lambda: None) -> int:
    """Write entries, records and the table of documents to one tar file.

    Returns:
        Entries written.

    Raises:
        OSError: The store cannot be read, cannot list its documents, or the file cannot be written.
    """
    count = 0
    with tarfile.open(fileobj=target, mode="w|") as tar:
        lines = (json.dumps([document, sorted(keys)]) for document, keys in sorted(backend.documents()))
        _add(tar, _DOCUMENTS, "\n".join(lines).encode())
        for name in backend.records():
            _add(tar, f"records/{name}.json", backend.get_record(name) or b"")
        for key in backend.keys():
            try:
                with backend.open(key) as reader:
                    data = reader.read(0, reader.size).tobytes()
            except ChunkNotFoundError:
                continue
            _add(tar, f"entries/{key}.safetensors", data)
            count += 1
            step()
    return count


@dataclass(slots=True)
class ImportReport:
    """What `import_` took in.

    Attributes:
        entries: Entries written.
        refused: Why members of the file were left out, by name.
    """

    entries: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def import_(backend: StorageBackend, source: BinaryIO, step: Step = lambda: None) -> ImportReport:
    """Take in what `export` wrote. Every entry is verified before it is written; nothing else of the file is trusted.

    Raises:
        OSError: The store refused, or the file is no tar file. What was taken in before stays.
    """
    report = ImportReport()
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                data = tar.extractfile(member) if member.isfile() else None
                try:
                    _take(backend, member, data, report)
                except (ValueError, CorruptChunkError, FingerprintMismatchError) as error:
                    report.refused[member.name] = str(error)
                step()
    except tarfile.TarError as error:
        raise OSError(f"not an exported store: {error}") from error
    return report


def _take(backend: StorageBackend, member: tarfile.TarInfo, file: IO[bytes] | None, report: ImportReport) -> None:
    entry, record = _ENTRY.fullmatch(member.name), _RECORD.fullmatch(member.name)
    if not (entry or record or member.name == _DOCUMENTS) or file is None:
        raise ValueError("this is not part of a store")
    if not entry and member.size > _LARGEST_RECORD:
        raise ValueError(f"{member.size} bytes are too many")
    data = file.read()
    if entry:
        header = _read_all(BytesReader(np.frombuffer(bytearray(data), dtype=np.uint8)), entry[1])
        backend.write(entry[1], data, label_of(header.origin, header.token_ids))
        report.entries += 1
    elif record:
        backend.put_record(record[1], data)
    else:
        for document, keys in _documents_in(data):
            backend.link(document, keys)


def _documents_in(data: bytes) -> Iterator[tuple[str, list[str]]]:
    for line in data.decode().splitlines():
        document, keys = json.loads(line)
        if not isinstance(document, str) or not all(re.fullmatch("[0-9a-f]{64}", key) for key in keys):
            raise ValueError("the table of documents is malformed")
        yield document, keys


def _read_all(reader: EntryReader, key: str) -> EntryHeader:
    header = read_header(reader, key)
    for layer_idx in range(len(header.offsets)):
        read_layer(reader, header, layer_idx)
    return header


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))
