"""Which reusable tokens are recomputed. The module's name is the selector's name: one file makes one more."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from rag_blend.selectors.base import AttentionSelector, ScoreSelector, TokenSelector

__all__ = ["AttentionSelector", "ScoreSelector", "TokenSelector", "selector_names", "selector_of"]


def selector_names() -> list[str]:
    """Names that `selector_of` knows."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def selector_of(choice: str | TokenSelector) -> TokenSelector:
    """The selector of that name, or the object itself.

    Raises:
        ValueError: No selector has this name.
    """
    if isinstance(choice, TokenSelector):
        return choice
    if choice not in selector_names():
        raise ValueError(f"unknown selector {choice!r}; known: {', '.join(selector_names())}")
    module = importlib.import_module(f"rag_blend.selectors.{choice}")
    return cast(TokenSelector, getattr(module, f"{choice.title().replace('_', '')}Selector")())
