"""From the bytes of a text file to its text."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from charset_normalizer import from_bytes

UTF_8 = "utf-8"
_UTF_8_OR_MARKED = "utf-8-sig"  # a byte order mark is no text
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SOUND_PER_LOST = 10  # the other encodings of 15 languages have at most 4 characters that happen to be UTF-8
_WESTERN = "cp1252"  # Windows' superset of Latin-1
_NOT_WRITTEN_IN_WESTERN = frozenset(
    ("Croatian", "Czech", "Hungarian", "Lithuanian", "Polish", "Romanian", "Slovak", "Slovene", "Turkish", "Vietnamese")
)


@dataclass(frozen=True)
class Decoded:
    """What bytes say.

    Attributes:
        text: The text, without a byte order mark.
        encoding: What it was read as.
        lost: How many U+FFFD stand in it for bytes of a damaged UTF-8 file.
    """

    text: str
    encoding: str = UTF_8
    lost: int = 0


def decode(data: bytes) -> Decoded:
    """Read bytes as UTF-8 if they are, or were before they were damaged; or in the likeliest other encoding.

    Raises:
        ValueError: It is no text, or in no encoding that is known.
    """
    found = Decoded(data.decode("utf-16"), "utf-16") if data.startswith(_UTF_16) else _utf_8(data) or _other(data)
    if "\0" in found.text:
        raise ValueError("is no text")
    return found


def _utf_8(data: bytes) -> Decoded | None:
    try:
        return Decoded(data.decode(_UTF_8_OR_MARKED))
    except UnicodeDecodeError as error:
        cut_off = len(error.object) - error.start if error.end == len(error.object) else 0
    text = data.decode(_UTF_8_OR_MARKED, errors="replace")
    lost = text.count(_REPLACEMENT)
    sound = sum(character > "\x7f" for character in text) - lost
    is_cut = cut_off > 1 or (cut_off == 1 and sound > 0)  # in its last character; one byte alone is a letter of others
    return Decoded(text, lost=lost) if is_cut or lost * _SOUND_PER_LOST <= sound else None


def _other(data: bytes) -> Decoded:
    found = from_bytes(data)
    likeliest = found.best()
    if likeliest is None:
        raise ValueError("is no text in any known encoding: convert it to UTF-8")
    encoding = likeliest.encoding
    # It tells languages well, but takes French for cp1257 and Spanish for cp1250.
    could_be_western = any(_WESTERN in match.could_be_from_charset for match in found)
    if could_be_western and likeliest.language not in _NOT_WRITTEN_IN_WESTERN:
        encoding = _WESTERN
    return Decoded(data.decode(encoding), encoding)
