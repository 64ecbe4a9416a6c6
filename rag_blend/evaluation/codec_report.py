"""The report of a codec run: as data, as JSON and as Markdown."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_blend.evaluation.bootstrap import Interval
from rag_blend.evaluation.report import json_text, markdown_table, write_texts

_NOTES = """\
Bytes per token are those of whole entries. Written: from computed rows in float32 to the bytes of an entry; read: from
an entry's bytes in memory to rows in float32, its checksums verified; both in GB of 16-bit rows a second, the fastest
of three times. Errors are relative L2 norms of what the codec adds to raw's 16 bits, means over layers and chunks. A
prompt's head, which lossy codecs leave raw, is in the bytes but not in times and errors. KL (nats) and agreement are
means over the positions of full prefill's greedy answer, given its tokens, and then over cases; brackets hold 95 %
intervals (bootstrap over cases).
"""


@dataclass(frozen=True, slots=True)
class CodecResult:
    """What was measured of one codec; intervals are 95 %, by bootstrap over cases.

    Attributes:
        codec: Its name.
        bytes_per_token: Bytes of all entries by the tokens in them.
        ratio: Raw's bytes by its own.
        write_gb_s: GB of 16-bit rows a second, from rows in float32 to the bytes of an entry.
        read_gb_s: The same from an entry's bytes in memory to rows in float32.
        key_error: Relative L2 error of the keys against raw's, the mean over layers and chunks.
        value_error: The same of the values.
        kl: Mean KL(full prefill || blended answer), nats.
        agreement: Mean share of positions whose most likely token is that of full prefill.
        kl_to_raw: Mean KL(blended from raw || blended from this codec), nats.
        agreement_with_raw: Mean share of positions whose most likely token is that of the answer blended from raw.
        ttft_s: Median seconds to the first token's logits.
    """

    codec: str
    bytes_per_token: float
    ratio: float
    write_gb_s: float
    read_gb_s: float
    key_error: float
    value_error: float
    kl: Interval
    agreement: Interval
    kl_to_raw: Interval
    agreement_with_raw: Interval
    ttft_s: float


@dataclass(frozen=True, slots=True)
class CodecReport:
    """Results of a run.

    Attributes:
        results: One per codec, raw first.
        environment: Names and values of what the numbers depend on.
        policy: What the answers were blended with, as `Policy.describe` gives it.
        prompt_tokens: Length of each case's prompt.
    """

    results: Sequence[CodecResult]
    environment: Mapping[str, str]
    policy: Mapping[str, Any]
    prompt_tokens: Sequence[int]

    def table(self) -> list[list[str]]:
        """A line per codec as text, header first."""
        return [["codec", *(name for name, _ in _COLUMNS)], *(_row(result) for result in self.results)]

    def to_json(self) -> str:
        """All of it; intervals as estimate, low, high; null for what is not finite."""
        data = {
            "environment": dict(self.environment),
            "policy": dict(self.policy),
            "prompt_tokens": list(self.prompt_tokens),
            "codecs": [_named(result) for result in self.results],
        }
        return json_text(data)

    def to_markdown(self) -> str:
        """The same for people."""
        lengths = self.prompt_tokens
        cases = (
            f"Policy {self.policy['name']}, n = {len(lengths)}; prompts of {min(lengths)} to {max(lengths)} tokens, "
            f"median {statistics.median(lengths):g}."
        )
        environment = [f"- {name}: {value}" for name, value in self.environment.items()]
        table = markdown_table(self.table())
        return "\n".join(["# Codecs", "", *environment, "", _NOTES, cases, "", *table, ""])

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``codecs.json`` and ``codecs.md``; returns their paths.

        Raises:
            OSError: They cannot be written.
        """
        return write_texts(directory, {"codecs.json": self.to_json(), "codecs.md": self.to_markdown()})


_COLUMNS: list[tuple[str, Callable[[CodecResult], str]]] = [
    ("bytes/token", lambda r: f"{r.bytes_per_token:,.0f}"),
    ("ratio", lambda r: f"{r.ratio:.2f}"),
    ("written GB/s", lambda r: f"{r.write_gb_s:.2f}"),
    ("read GB/s", lambda r: f"{r.read_gb_s:.2f}"),
    ("error of keys", lambda r: f"{r.key_error:.2g}"),
    ("error of values", lambda r: f"{r.value_error:.2g}"),
    ("KL to full", lambda r: _interval(r.kl, ".3g")),
    ("agreement", lambda r: _interval(r.agreement, ".3f")),
    ("KL to raw", lambda r: _interval(r.kl_to_raw, ".2g")),
    ("agreement with raw", lambda r: _interval(r.agreement_with_raw, ".3f")),
    ("TTFT", lambda r: f"{r.ttft_s:.3f} s"),
]


def _row(result: CodecResult) -> list[str]:
    return [result.codec, *(show(result) for _, show in _COLUMNS)]


def _interval(value: Interval, form: str) -> str:
    return f"{value.estimate:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _named(result: CodecResult) -> dict[str, Any]:
    """A result with its intervals as objects: in JSON a tuple would lose its names."""
    values = asdict(result)
    return {name: value._asdict() if isinstance(value, Interval) else value for name, value in values.items()}
