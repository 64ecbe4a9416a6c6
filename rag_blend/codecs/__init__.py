"""How caches are written down. The module's name is the codec's name: one file makes one more."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import cast

from rag_blend.codecs.base import Codec

__all__ = ["Codec", "codec_names", "codec_of"]


@functools.cache
def codec_names() -> tuple[str, ...]:
    """Names that `codec_of` knows, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in names if name != "base" and not name.startswith("_")))


def codec_of(choice: str | Codec) -> Codec:
    """The codec of that name, or the object itself.

    Raises:
        ValueError: No codec has this name, or the object has taken a name that another one has.
        ModuleNotFoundError: It needs a library that is not installed; the text says which to install.
    """
    if isinstance(choice, str):
        if choice not in codec_names():
            raise ValueError(f"unknown codec {choice!r}; known: {', '.join(codec_names())}")
        return _own(choice)
    if choice.name in codec_names() and type(choice) is not type(_own(choice.name)):
        raise ValueError(f"the name {choice.name!r} is that of another codec")
    return choice


@functools.cache
def _own(name: str) -> Codec:
    module = importlib.import_module(f"rag_blend.codecs.{name}")
    return cast(Codec, getattr(module, f"{name.title().replace('_', '')}Codec")())
