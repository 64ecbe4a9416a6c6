"""Results on disk, one line per case, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.chunk import digest_json
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.results import CaseResult
from rag_blend.fingerprint import fingerprint_of

_PACKAGE = Path(__file__).parent.parent
# How results are shown changes none of them.
_PRESENTATION = (
    "cli", "evaluation/report.py", "evaluation/plots.py", "evaluation/figure", "evaluation/speed/report.py",
    "evaluation/speed/plots.py", "evaluation/speed/page.py", "evaluation/speed/peers.py",
    "evaluation/speed/sweep_view.py", "evaluation/speed/ttft_view.py",
)  # fmt: skip


class Journal:
    """Results of one configuration, in a file of its own named after the configuration's digest.

    Args:
        directory: Where the file is, or will be.
        configuration: Whatever the results depend on besides the cases, as JSON-like data. Results of another
            configuration are in another file and are never mixed in.

    Raises:
        OSError: The directory cannot be made, or the file not be read.
    """

    def __init__(self, directory: str | os.PathLike[str], configuration: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path = Path(directory) / f"cases-{digest_json(configuration)[:16]}.jsonl"
        self.results: dict[str, CaseResult] = {}
        if self.path.exists():
            self._read()

    def append(self, result: CaseResult) -> None:
        """Keep a result, on disk before this returns.

        Raises:
            OSError: The disk refused.
        """
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.results[result.key] = result

    def _read(self) -> None:
        whole = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                result = CaseResult.from_json(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError):
                break  # a write was cut short: what follows would be glued to it
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self.results[result.key] = result
        if whole < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.truncate(whole)


def configuration_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **more: Any) -> dict[str, Any]:
    """What results depend on: model, machine, this code, and whatever else is named."""
    environment = environment_of(model)
    del environment["date"]
    return {
        "model": fingerprint_of(model, tokenizer, model.dtype).digest,
        "environment": environment,
        "code": code_digest(),
        **more,
    }


def code_digest() -> str:
    """Digest of this package's source, but for what only shows results: other code may measure something else."""
    files = [(file.relative_to(_PACKAGE).as_posix(), file) for file in sorted(_PACKAGE.rglob("*.py"))]
    return digest_json([(name, file.read_text("utf-8")) for name, file in files if not name.startswith(_PRESENTATION)])
