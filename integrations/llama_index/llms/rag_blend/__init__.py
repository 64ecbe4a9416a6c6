"""LlamaIndex integration: answer from KV caches that were computed when the index was built.

Example:
    ```python
    from llama_index.llms.rag_blend import BlendLLM

    llm = BlendLLM(model="Qwen/Qwen2.5-1.5B-Instruct", storage="kv/")
    index = VectorStoreIndex.from_documents(documents)
    llm.attach(index)  # the one line at ingestion; later inserts, refreshes and deletes are followed
    print(index.as_query_engine(llm=llm).query("What is the warranty period?"))
    ```
"""

from llama_index.llms.rag_blend.base import BlendLLM
from llama_index.llms.rag_blend.callback_handler import BlendCallbackHandler
from llama_index.llms.rag_blend.events import BlendEvent
from llama_index.llms.rag_blend.precompute import PrecomputeKV
from llama_index.llms.rag_blend.vector_store import BlendVectorStore

__all__ = ["BlendCallbackHandler", "BlendEvent", "BlendLLM", "BlendVectorStore", "PrecomputeKV"]
