"""The same vectors without a framework."""

from rag_blend_app.vectors import load_word_vectors, unit_vectors

__all__ = ["load_word_vectors", "unit_vectors"]
