"""The parts of `rag_blend.storage.tiered`."""
