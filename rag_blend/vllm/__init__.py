"""Stored chunks inside an unpatched vLLM server: a KV connector, a worker class, and what a client sends.

    --kv-transfer-config  loads `rag_blend.vllm.connector.BlendConnector`
    --worker-cls          rag_blend.vllm.worker.BlendWorker

This module itself imports neither vLLM nor torch: clients use it, too. docs/vllm.md has the whole commands.
"""

from rag_blend.vllm.recipe import Recipe, request_fields

__all__ = ["Recipe", "request_fields"]
