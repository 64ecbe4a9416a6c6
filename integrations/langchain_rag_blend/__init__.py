"""LangChain integration: answer from KV caches that were computed when the documents were indexed.

Example:
    ```python
    from langchain_rag_blend import BlendVectorStore, ChatBlend

    llm = ChatBlend(model="Qwen/Qwen2.5-1.5B-Instruct", storage="kv/")
    store = BlendVectorStore(InMemoryVectorStore(embedding), llm, prompt=prompt)
    store.add_documents(documents)
    chain = create_retrieval_chain(store.as_retriever(), create_stuff_documents_chain(llm, prompt))
    print(chain.invoke({"input": "What is the warranty period?"})["answer"])
    ```
"""

from langchain_rag_blend.callbacks import BlendCallbackHandler
from langchain_rag_blend.chat_model import ChatBlend
from langchain_rag_blend.llm import BlendLLM
from langchain_rag_blend.transformer import PrecomputeKV
from langchain_rag_blend.vector_store import BlendVectorStore

__all__ = ["BlendCallbackHandler", "BlendLLM", "BlendVectorStore", "ChatBlend", "PrecomputeKV"]
