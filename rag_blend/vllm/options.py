"""What the operator says in `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from rag_blend.fingerprint import stored_dtype

SECRET_VARIABLE = "RAG_BLEND_SECRET"  # not in the configuration: vLLM logs that
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's configuration. What concerns stored chunks must be as it was when they were ingested.

    Attributes:
        storage: Directory, URL, or list of these; see `BlendEngine`. All ranks and replicas must reach it.
        namespaces: Tenants that may be asked for.
        prime: See `BlendEngine`, like the next five.
        prime_tokens: The same.
        prime_texts: The same.
        exact_first: The same.
        any_head: The same.
        kv_dtype: The same; a name.
        refresh_s: After so many seconds the store is looked through again for chunks that were ingested meanwhile.
        max_rows: Rows computed for blends per step at most, so that other requests' tokens do not wait long; None is
            vLLM's `max_num_batched_tokens`.
    """

    storage: str | list[str]
    namespaces: tuple[str, ...] = ("default",)
    prime: str = "sample"
    prime_tokens: int = 512
    prime_texts: int = 1
    exact_first: bool = True
    any_head: bool = False
    kv_dtype: str | None = None
    refresh_s: float = 60.0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if not self.storage or (isinstance(self.storage, str) and self.storage.lower().startswith("memory://")):
            raise ValueError("storage must be a place that the engine that ingests shares with this server")
        if self.kv_dtype not in {None, *_DTYPES}:
            raise ValueError(f"kv_dtype must be one of {', '.join(_DTYPES)}, got {self.kv_dtype!r}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {self.max_rows}")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Options:
        """Read and check them.

        Raises:
            ValueError: One is unknown, missing or out of its range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(extra_config) - known):
            raise ValueError(
                f"unknown in kv_connector_extra_config: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        if "storage" not in extra_config:
            raise ValueError('kv_connector_extra_config must say where the chunks are: {"storage": "kv/"}')
        given = dict(extra_config)
        if "namespaces" in given:
            if isinstance(given["namespaces"], str):
                raise ValueError(f"namespaces must be a list, such as [{given['namespaces']!r}]")
            given["namespaces"] = tuple(given["namespaces"])
        return cls(**given)

    @property
    def priming(self) -> tuple[str, int, int, bool]:
        """The first arguments of a `Primer`."""
        return self.prime, self.prime_tokens, self.prime_texts, self.exact_first

    def stored_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of stored keys and values."""
        return stored_dtype(model_dtype, None if self.kv_dtype is None else _DTYPES[self.kv_dtype])


def secret() -> str:
    """The secret in this process's environment; empty if there is none."""
    return os.environ.get(SECRET_VARIABLE, "")
