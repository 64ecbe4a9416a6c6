"""The documents and questions of the examples, which are those of `rag-blend demo`."""

from rag_blend_app.corpus import QUESTIONS, SUFFIXES, Doc, load_documents, questions_for

__all__ = ["QUESTIONS", "SUFFIXES", "Doc", "load_documents", "questions_for"]
