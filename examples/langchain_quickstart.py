"""A LangChain chain over real documents, each question answered with and without reuse.

    python examples/langchain_quickstart.py                       # the demo model, Python's language reference
    python examples/langchain_quickstart.py --model path/or/hub-id --documents docs/ "A question?"

Needs `pip install -e ".[demo,langchain]"`. Two lines differ from any other LangChain program: the model's class, and
the wrapper around the vector store.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

import argparse
import logging
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_blend import BlendVectorStore, ChatBlend
from langchain_text_splitters import RecursiveCharacterTextSplitter
from rag_blend_app.corpus import QUESTIONS, load_documents, questions_for
from rag_blend_app.vectors import load_word_vectors, unit_vectors

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question in one or two sentences, using only the context below.\n\nContext:\n{context}"),
        ("human", "{question}"),
    ]
)


class WordLlamaEmbeddings(Embeddings):
    """Static word embeddings, averaged, about a millisecond per chunk; the weights come with the wheel."""

    def __init__(self) -> None:
        self._model = load_word_vectors()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return unit_vectors(self._model, texts)

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    docs = load_documents(args.documents, max_tokens=1 if args.fast else None)
    splitter = RecursiveCharacterTextSplitter(chunk_size=400 if args.fast else 2000, chunk_overlap=0)
    chunks = splitter.create_documents([doc.text for doc in docs], [{"title": doc.title} for doc in docs])
    chunks = chunks[:12] if args.fast else chunks

    llm = ChatBlend(model=args.model or demo_model(), storage=args.storage, max_tokens=args.max_tokens, temperature=0)
    store = BlendVectorStore(InMemoryVectorStore(WordLlamaEmbeddings()), llm, prompt=PROMPT, show_progress=True)
    store.add_documents(chunks, ids=[str(number) for number in range(len(chunks))])

    gather: Any = {"context": store.as_retriever() | format_docs, "question": RunnablePassthrough()}
    chain = gather | PROMPT | llm
    full_prefill = gather | PROMPT | llm.bind(reuse=False)

    questions = args.question or (questions_for(docs) if args.documents else QUESTIONS)
    for question in questions[:2] if args.fast else questions:
        print(f"\n{question}")
        show("full prefill", full_prefill.invoke(question))
        show("rag_blend", chain.invoke(question))
    llm.close()


def show(how: str, answer: AIMessage) -> None:
    usage, figures = answer.usage_metadata, answer.response_metadata["rag_blend"]
    assert usage is not None
    reused = usage["input_token_details"]["cache_read"]
    print(
        f"  {how:>12}: first token after {figures['ttft_s']:.2f} s, {reused:,} of {usage['input_tokens']:,} tokens "
        f"from caches\n  {'':>12}  {' '.join(answer.text.split())}"
    )


def demo_model() -> str:
    from rag_blend.demo import demo_model_dir

    return str(demo_model_dir())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("question", nargs="*", help="what to ask (default: six questions about the documents)")
    parser.add_argument("--model", help="folder or hub id of the model (default: the demo model)")
    parser.add_argument("--storage", default=".demo/langchain-kv", help="where the caches are kept")
    parser.add_argument("--documents", type=Path, help="a directory of .txt, .md and .rst files")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--fast", action="store_true", help="a dozen short chunks and two questions: a check")
    return parser.parse_args()


if __name__ == "__main__":
    main()
