"""Text of strangers on a terminal."""

from __future__ import annotations

# C0, DEL and C1: what a terminal obeys (colours, titles, the clipboard) begins with one of them.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_HARMLESS = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    """The text of a document or a model, its control characters but newline and tab replaced by U+FFFD."""
    return text.translate(_HARMLESS)
