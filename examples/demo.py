"""A question over real documents, answered four times by the same model: see how much faster blending is.

Run it with `make demo`; `DOCS=some/directory make demo` takes your own .txt, .md and .rst files.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

import hashlib
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import torch
from corpus import QUESTIONS, Doc, load_documents, questions_for
from embedding import WordLlamaEmbedding
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode
from llama_index.llms.rag_blend import BlendLLM
from llama_index.vector_stores.faiss import FaissMapVectorStore
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rag_blend import BlendEngine, Generation
from rag_blend.demo import demo_model_dir

CHUNK_TOKENS = 512
CHUNKS_PER_PROMPT = 4
ANSWER_TOKENS = 32
HEADS = 'rag_blend, selector="heads"'
POLICIES = ("full prefill", "CacheBlend as published", "rag_blend", HEADS)

console = Console(width=100)


@dataclass
class Answer:
    """One answer and the logits of its first token."""

    generation: Generation
    logits: torch.Tensor


class FirstLogits(LogitsProcessor):
    """Keeps the logits from which the first token is chosen."""

    taken: torch.Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not hasattr(self, "taken"):
            self.taken = scores[0].clone()
        return scores


class RecordingEngine(BlendEngine):
    """Remembers the last prompt that the query engine sent, and the answer to it."""

    prompt: str | Sequence[int] = ""
    answer: Answer

    def generate(self, prompt: str | Sequence[int], *args: Any, **kwargs: Any) -> Generation:
        first = FirstLogits()
        generation = super().generate(prompt, *args, **kwargs, logits_processor=[first])
        self.prompt, self.answer = prompt, Answer(generation, first.taken)
        return generation


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    disable_progress_bar()
    own = os.environ.get("DOCS")
    try:
        documents = load_documents(Path(own) if own else None)
    except OSError as error:
        sys.exit(f"{error}\nDOCS must name a directory of .txt, .md or .rst files.")
    model_dir = demo_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    tokens = sum(len(tokenizer.encode(doc.text, verbose=False)) for doc in documents)
    console.print(
        f"[bold]{len(documents)} documents, {tokens:,} tokens[/], from {own or 'the Python language reference'}; "
        f"model SmolLM2-135M-Instruct, float32, {torch.get_num_threads()} threads"
    )
    ours, published = make_engines(model, tokenizer, documents)
    with ours, published:
        index = build_index(documents, tokenizer)
        llm = BlendLLM(engine=ours, max_new_tokens=ANSWER_TOKENS, generate_kwargs={"do_sample": False})
        ingest(llm, index)
        rows = [
            ask(question, index, llm, ours, published) for question in (questions_for(documents) if own else QUESTIONS)
        ]
    summarise(rows)


def make_engines(model: PreTrainedModel, tokenizer: Any, documents: list[Doc]) -> tuple[RecordingEngine, BlendEngine]:
    """On one model and one store: our default, and CacheBlend as published (hkvd, 15 %, unprimed)."""
    titles = hashlib.sha256("\n".join(doc.title for doc in documents).encode()).hexdigest()[:12]
    storage = Path(".demo") / "kv" / titles
    # Nothing is taken from earlier prompts: each way of answering is to do its own work.
    ours = RecordingEngine(model, tokenizer, storage, prefix_cache_bytes=0)
    published = BlendEngine(
        model, tokenizer, storage, selector="hkvd", recompute_ratio=0.15, prime="none", prefix_cache_bytes=0
    )
    return ours, published


def build_index(documents: list[Doc], tokenizer: Any) -> VectorStoreIndex:
    """A faiss index over the documents, cut into chunks of at most `CHUNK_TOKENS` of the model's tokens."""
    embedding = WordLlamaEmbedding()
    store = FaissMapVectorStore(faiss.IndexIDMap2(faiss.IndexFlatIP(embedding.embed_dim)))
    splitter = SentenceSplitter(
        chunk_size=CHUNK_TOKENS, chunk_overlap=20, tokenizer=lambda text: tokenizer.encode(text, verbose=False)
    )
    return VectorStoreIndex.from_documents(
        [Document(text=doc.text, doc_id=doc.title) for doc in documents],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
        transformations=[splitter],
    )


def ingest(llm: BlendLLM, index: VectorStoreIndex) -> None:
    report = llm.attach(index)
    if report.chunks:
        console.print(
            f"[bold]Indexed[/]: {report.chunks} chunks prefilled once, in {report.seconds:.0f} s "
            f"({report.tokens / report.seconds:.0f} tokens/s), {report.bytes / 1e6:.0f} MB of caches"
        )
    if report.skipped:
        console.print(f"[bold]Reused[/]: the caches of {report.skipped} chunks were in the store already")


def ask(
    question: str, index: VectorStoreIndex, llm: BlendLLM, ours: RecordingEngine, published: BlendEngine
) -> dict[str, Answer]:
    """Let the query engine ask; answer its very prompt in the other ways as well; show all."""
    response = index.as_query_engine(llm=llm, similarity_top_k=CHUNKS_PER_PROMPT).query(question)
    chunks = [hit.node.get_content(MetadataMode.LLM) for hit in response.source_nodes]
    published.ingest(chunks, head=llm.head(), progress=False)
    answers = {
        "full prefill": answer(ours, ours.prompt, reuse=False),
        "CacheBlend as published": answer(published, ours.prompt),
        "rag_blend": ours.answer,
        HEADS: answer(ours, ours.prompt, selector="heads"),
    }
    show(question, answers)
    return answers


def answer(engine: BlendEngine, prompt: str | Sequence[int], **how: Any) -> Answer:
    first = FirstLogits()
    generation = BlendEngine.generate(  # not the recording one
        engine, prompt, ANSWER_TOKENS, add_special_tokens=False, do_sample=False, logits_processor=[first], **how
    )
    return Answer(generation, first.taken)


def numbers_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) of the first token's distribution, in nats."""
    return float(
        torch.nn.functional.kl_div(other.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="sum")
    )


def show(question: str, answers: dict[str, Answer]) -> None:
    full = answers["full prefill"]
    table = numbers_table(f"\n[bold]{escape(question)}[/]", "TTFT", "gain", "KL", "reused", "recomputed", "fresh")
    for name, result in answers.items():
        stats = result.generation.stats
        table.add_row(
            name,
            f"{stats.ttft_s:.2f} s",
            f"{full.generation.stats.ttft_s / stats.ttft_s:.1f}x",
            f"{kl(full.logits, result.logits):.3f}",
            f"{stats.prefix_tokens + stats.reused_tokens:,}",
            f"{stats.recomputed_tokens:,}",
            f"{stats.fresh_tokens:,}",
        )
    console.print(table)
    for name, result in answers.items():
        console.print(f"  [cyan]{name}:[/] {escape(' '.join(result.generation.text.split()))}")


def summarise(rows: list[dict[str, Answer]]) -> None:
    title = f"\n[bold]Medians over {len(rows)} questions[/] (recomputed: a selector's own passes are charged)"
    table = numbers_table(title, "prompt tokens", "TTFT", "gain", "KL of first token", "recomputed")
    for name in POLICIES:
        stats = [row[name].generation.stats for row in rows]
        gains = [row["full prefill"].generation.stats.ttft_s / row[name].generation.stats.ttft_s for row in rows]
        table.add_row(
            name,
            f"{statistics.median(s.prompt_tokens for s in stats):.0f}",
            f"{statistics.median(s.ttft_s for s in stats):.2f} s",
            f"{statistics.median(gains):.1f}x",
            f"{statistics.median(kl(row['full prefill'].logits, row[name].logits) for row in rows):.4f}",
            "-" if name == "full prefill" else f"{statistics.median(s.recompute_ratio for s in stats):.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    console.print(f"{time.perf_counter() - started:.0f} s in all")
