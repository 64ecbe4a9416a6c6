"""Write the table of docs/cost.md: what the caches of well-known models take, by their published configurations.

python tests/models/kv_sizes.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from rag_blend.codecs import codec_of

PAGE = Path(__file__).parents[2] / "docs" / "cost.md"
CHUNK_TOKENS = 512
CODECS = {"raw": torch.float16, "int8": torch.float32, "int4": torch.float32}  # with the dtype that each encodes


class Sizes(NamedTuple):
    """What of a ``config.json`` a cache's size depends on."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int


MODELS = {
    "SmolLM2-135M": Sizes(30, 3, 64),
    "SmolLM2-360M": Sizes(32, 5, 64),
    "SmolLM2-1.7B": Sizes(24, 32, 64),
    "Qwen2.5-0.5B": Sizes(24, 2, 64),
    "Qwen2.5-1.5B": Sizes(28, 2, 128),
    "Qwen2.5-3B": Sizes(36, 2, 128),
    "Qwen2.5-7B": Sizes(28, 4, 128),
    "Qwen3-0.6B": Sizes(28, 8, 128),
    "Qwen3-1.7B": Sizes(28, 8, 128),
    "Qwen3-4B": Sizes(36, 8, 128),
    "Qwen3-8B": Sizes(36, 8, 128),
    "Qwen3-14B": Sizes(40, 8, 128),
    "Qwen3-30B-A3B": Sizes(48, 4, 128),
    "Qwen3-32B": Sizes(64, 8, 128),
    "Llama-3.2-1B": Sizes(16, 8, 64),
    "Llama-3.2-3B": Sizes(28, 8, 128),
    "Llama-3.1-8B": Sizes(32, 8, 128),
    "Mistral-7B-v0.3": Sizes(32, 8, 128),
}


def bytes_per_token(sizes: Sizes, codec: str) -> float:
    """Of a chunk of 512 tokens, without the header of its entry."""
    shape = (2, sizes.num_key_value_heads, CHUNK_TOKENS, sizes.head_dim)
    (of_layer,) = codec_of(codec).sizes(shape, CODECS[codec])
    return sizes.num_hidden_layers * of_layer / CHUNK_TOKENS


def table() -> str:
    """Markdown."""
    lines = [
        "| model | layers x KV heads x head size | KiB per token | a chunk of 512 tokens | a million tokens "
        "| in `int8` | in `int4` |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in MODELS.items():
        raw, *smaller = (bytes_per_token(sizes, codec) for codec in CODECS)
        million = " | ".join(f"{size * 1e6 / 1e9:.1f} GB" for size in (raw, *smaller))
        chunk = f"{raw * CHUNK_TOKENS / 1e6:.1f} MB"
        lines.append(f"| {name} | {' x '.join(map(str, sizes))} | {raw / 1024:g} | {chunk} | {million} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    return re.sub(r"(<!-- sizes -->\n).*?(\n<!-- end -->)", rf"\1{table()}\2", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
