"""A model's weights, in the format that a peer reads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf

from rag_blend.demo import PACKAGE, demo_model_dir

EMBEDDING = "token_embd.weight"


class NoWeightsError(Exception):
    """A model does not come in the format that is asked for."""


@dataclass(frozen=True)
class Model:
    """One model, twice: as a Hugging Face directory and, for peers that read nothing else, as a GGUF file."""

    directory: Path
    gguf: Path | None

    def weights(self, kind: str, made: Path) -> Path:
        """The directory (``"hf"``), or a GGUF file in a format such as ``"Q4_0"``.

        Args:
            kind: The format.
            made: Where files go in formats in which the model is not there yet.

        Raises:
            NoWeightsError: There is no GGUF file.
        """
        if kind == "hf":
            return self.directory
        if self.gguf is None:
            raise NoWeightsError("it reads GGUF files; name one with --gguf")
        if kind in self.gguf.name:
            return self.gguf
        target = made / f"{self.gguf.stem}-as-{kind}-{self.gguf.stat().st_size}.gguf"
        if not target.is_file():
            made.mkdir(parents=True, exist_ok=True)
            requantise(self.gguf, target, gguf.GGMLQuantizationType[kind])
        return target


def demo_model() -> Model:
    """The model that `make demo` installs.

    Raises:
        DemoModelError: It is not installed, or damaged.
    """
    directory = demo_model_dir()
    shipped = (Path(str(file.locate())) for file in metadata.files(PACKAGE) or [] if file.suffix == ".gguf")
    return Model(directory, next(shipped))


def requantise(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write `source` to `target` with its matrices dequantised and quantised again.

    The embedding, which small models use as output layer as well, gets 8 bits, as llama.cpp's own tool does it.
    """
    reader: Any = gguf.GGUFReader(source)
    descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(descriptor)
    try:
        _write(reader, name, kind)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _write(reader: Any, path: str, kind: gguf.GGMLQuantizationType) -> None:
    types = gguf.GGMLQuantizationType
    writer: Any = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):  # the writer writes these
            array_of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], array_of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = types.Q8_0 if tensor.name == EMBEDDING else types.F32 if values.ndim == 1 else kind
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
