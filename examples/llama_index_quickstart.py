"""LlamaIndex's "five lines" with a local model: what rag_blend changes are the lines marked >>>.

    .venv/bin/python examples/llama_index_quickstart.py                    # the demo model, Python's language reference
    .venv/bin/python examples/llama_index_quickstart.py --model DIR --docs DIR

Run it twice: the second time nothing is prefilled at the start, and the first question is as fast as the others.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.rag_blend import BlendLLM  # >>> stock: from llama_index.llms.huggingface import HuggingFaceLLM
from rag_blend_app.corpus import QUESTIONS, load_documents, questions_for
from rag_blend_app.embedding import WordLlamaEmbedding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--docs", type=Path, help="folder of .txt, .md and .rst files")
    parser.add_argument("--storage", default=".demo/quickstart", help="where the KV caches are kept")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    args = parser.parse_args()
    docs = load_documents(args.docs)

    # >>> stock: Settings.llm = HuggingFaceLLM(model_name=model, tokenizer_name=model, max_new_tokens=32)
    Settings.llm = llm = BlendLLM(args.model or demo_model(), storage=args.storage, max_new_tokens=32)
    Settings.embed_model = WordLlamaEmbedding()
    Settings.tokenizer = llm.tokenizer  # chunks and prompts are measured in the model's own tokens
    Settings.node_parser = SentenceSplitter(chunk_size=args.chunk_tokens, chunk_overlap=20)

    index = VectorStoreIndex.from_documents([Document(text=doc.text, id_=doc.title) for doc in docs])
    report = llm.attach(index)  # >>> new: prefill what is in the index, and whatever is added later
    print(f"{report.chunks} chunks prefilled, {report.skipped} were cached already")

    query_engine = index.as_query_engine(similarity_top_k=4)
    for question in questions_for(docs, 3) if args.docs else QUESTIONS[:3]:
        started = time.perf_counter()
        response = query_engine.query(question)
        print(f"\n{question}\n  {' '.join(str(response).split())}\n  ({time.perf_counter() - started:.1f} s)")
    llm.close()


def demo_model() -> str:
    from rag_blend.demo import demo_model_dir

    return str(demo_model_dir())


if __name__ == "__main__":
    main()
