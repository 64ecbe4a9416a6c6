"""The classes of clients of a server, whose packages are optional."""

from importlib import import_module
from typing import Any


def server_class(module: str, name: str) -> Any:
    """Return a class of clients.

    Args:
        module: Where it is defined.
        name: Its name there.

    Raises:
        ModuleNotFoundError: A package for it is not installed.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        hint = 'in a clone of rag_blend: pip install -e ".[server]"'
        raise ModuleNotFoundError(f"{missing}; {hint}", name=missing.name) from None
