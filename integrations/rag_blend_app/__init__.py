"""What `rag-blend ingest`, `ask`, `chat` and `demo` stand on: a small RAG application on LlamaIndex. Not public."""
