"""Eight bits a number: a little more than half of raw's bytes, and answers that can hardly be told from raw's."""

from __future__ import annotations

from rag_blend.codecs._affine import AffineCodec


class Int8Codec(AffineCodec):
    """One byte a number."""

    name = "int8"
    bits = 8
    group = 64
