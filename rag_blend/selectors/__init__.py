"""Which reusable tokens are recomputed. The module's name is the selector's name: one file makes one more."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import cast

from rag_blend.selectors.base import AttentionSelector, ScoreSelector, TokenSelector

__all__ = ["AttentionSelector", "ScoreSelector", "TokenSelector", "selector_names", "selector_of"]


def selector_names() -> list[str]:
    """Names that `selector_of` knows."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def selector_of(choice: str | TokenSelector) -> TokenSelector:
    """The selector of that name, always the same object, or the object itself.

    Raises:
        ValueError: No selector has this name.
    """
    return choice if isinstance(choice, TokenSelector) else _named(choice)


@cache  # so that two prompts can be seen to have been blended in the same way, and no folder is listed for each
def _named(name: str) -> TokenSelector:
    if name not in selector_names():
        raise ValueError(f"unknown selector {name!r}; known: {', '.join(selector_names())}")
    module = importlib.import_module(f"rag_blend.selectors.{name}")
    return cast(TokenSelector, getattr(module, f"{name.title().replace('_', '')}Selector")())
