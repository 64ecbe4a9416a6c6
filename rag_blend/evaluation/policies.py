"""What is compared: ways to prime, select and recompute, written as short texts."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_blend.engine import BlendEngine
from rag_blend.primer import CHOICES as PRIMES
from rag_blend.selectors import TokenSelector
from rag_blend.selectors import selector_names as known_selectors

_WITHOUT_RATIO = ("all", "none")  # they recompute everything or nothing, whatever the ratio
_OWN_FIELDS = (
    "self", "model", "tokenizer", "storage", "selector", "recompute_ratio", "prime", "kv_dtype", "codec",
    "shadow", "max_batch",
    "prefix_cache_bytes",
)  # fmt: skip
_PRESETS = {"published": "none/hkvd:0.15", "reuse": "none/none"}
_SYNTAX = "prime/selector[:ratio][,option=value...] (none/hkvd:0.15), or one of: default, published, reuse"


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to answer from stored chunks.

    Attributes:
        name: Its name in reports.
        prime: `BlendEngine`'s argument of that name. None: the engine's default.
        selector: The same.
        ratio: `recompute_ratio`; None: the selector's default.
        options: Further arguments of `BlendEngine`, e.g. ``{"prime_tokens": 256}``.
    """

    name: str
    prime: str | None = None
    selector: str | TokenSelector | None = None
    ratio: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy.

        Args:
            text: ``"none/hkvd:0.15"``, ``"sample/heads"``, ``"sample/anchor:0.08,prime_tokens=256"``; or
                ``"published"`` (CacheBlend as published: none/hkvd:0.15), ``"reuse"`` (none/none), ``"default"``
                (the engine as it is without any argument).

        Raises:
            ValueError: It is none of these; the text says what is wrong.
        """
        name = text.strip()
        if name == "default":
            return cls("default")
        body, *pairs = _PRESETS.get(name, name).split(",")
        prime, slash, choice = body.partition("/")
        selector, colon, ratio = choice.partition(":")
        if not slash:
            raise ValueError(f"policy {name!r} is not of the form {_SYNTAX}")
        if prime not in PRIMES:
            raise ValueError(f"policy {name!r}: unknown prime {prime!r}; known: {', '.join(PRIMES)}")
        if selector not in known_selectors():
            raise ValueError(f"policy {name!r}: unknown selector {selector!r}; known: {', '.join(known_selectors())}")
        if colon and selector in _WITHOUT_RATIO:
            raise ValueError(f"policy {name!r}: the selector {selector!r} takes no ratio")
        options = dict(_option(name, pair) for pair in pairs)
        return cls(name, prime, selector, _ratio(name, ratio) if colon else None, options)

    @property
    def group(self) -> str:
        """Policies of one group can share an engine: they differ in selector and ratio only."""
        return repr((self.prime, sorted(self.options.items())))

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What an engine of this policy's group is made with, besides model, tokenizer and storage."""
        return {**({} if self.prime is None else {"prime": self.prime}), **self.options}

    @property
    def call_arguments(self) -> dict[str, Any]:
        """What is given to each `prefill` and `generate`."""
        return {"selector": self.selector, "recompute_ratio": self.ratio}

    def describe(self) -> dict[str, Any]:
        """All of it as JSON-like data; a selector object is described by its class and attributes."""
        selector = self.selector
        if isinstance(selector, TokenSelector):
            selector = f"{type(selector).__qualname__}({vars(selector)})"
        options = {name: str(value) for name, value in sorted(self.options.items())}
        return {
            "name": self.name,
            "prime": self.prime,
            "selector": selector,
            "ratio": self.ratio,
            "options": options,
        }


def _ratio(name: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"policy {name!r}: the ratio must be a number between 0 and 1, not {text!r}")
    return ratio


def _option(name: str, pair: str) -> tuple[str, Any]:
    option, equals, text = (part.strip() for part in pair.partition("="))
    known = [p for p in inspect.signature(BlendEngine.__init__).parameters if p not in _OWN_FIELDS]
    if not equals or option not in known:
        raise ValueError(f"policy {name!r}: unknown option {pair!r}; known: {', '.join(f'{o}=...' for o in known)}")
    try:
        return option, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return option, text
