"""Static word embeddings, averaged: about a millisecond per text on a CPU. The weights come with the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import wordllama


def load_word_vectors() -> Any:
    """The model; nothing is downloaded."""
    # A plain load() looks for the tokenizer in the wrong folder of the wheel and then asks the network.
    # Naming the installed folder as the "cache" makes it look in the right one.
    return wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)


def unit_vectors(model: Any, texts: list[str]) -> list[list[float]]:
    """One vector of length 1 per text."""
    vectors = np.asarray(model.embed(texts), dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A text without tokens has the zero vector, and stays at it: similar to nothing.
    unit: list[list[float]] = np.divide(vectors, lengths, out=vectors, where=lengths > 0).tolist()
    return unit
