"""A small, offline embedding model: WordLlama behind LlamaIndex's `BaseEmbedding`."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from rag_blend_app.vectors import load_word_vectors, unit_vectors


class WordLlamaEmbedding(BaseEmbedding):
    """Static word embeddings, averaged: 256 dimensions, length 1, about a millisecond per chunk on a CPU.

    The weights come with the ``wordllama`` wheel, so nothing is downloaded.
    """

    _model: Any = PrivateAttr()

    def __init__(self, **kwargs: Any) -> None:
        """Load the weights; ``kwargs`` are the fields of `BaseEmbedding`, such as ``embed_batch_size``."""
        kwargs.setdefault("model_name", "wordllama-l2-supercat-256")
        super().__init__(**kwargs)
        self._model = load_word_vectors()

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex stores with serialised settings."""
        return "WordLlamaEmbedding"

    @property
    def embed_dim(self) -> int:
        """Length of every vector, as a vector store needs to know it beforehand."""
        return int(self._model.embedding.shape[1])

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return unit_vectors(self._model, texts)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)
