"""The embedding model of the LlamaIndex examples: small, on the CPU, nothing is downloaded."""

from rag_blend_app.embedding import WordLlamaEmbedding

__all__ = ["WordLlamaEmbedding"]
