"""A question over real documents, answered four times by the same model: see how much faster blending is."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import torch
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

from rag_blend import BlendEngine, Generation
from rag_blend_app.corpus import QUESTIONS, Doc, load_documents, questions_for
from rag_blend_app.embedding import WordLlamaEmbedding
from rag_blend_app.terminal import printable

CHUNK_TOKENS = 512
CHUNKS_PER_PROMPT = 4
ANSWER_TOKENS = 32
HEADS = 'rag_blend, selector="heads"'
POLICIES = ("full prefill", "CacheBlend as published", "rag_blend", HEADS)


@dataclass
class Answer:
    """One answer and the logits of its first token."""

    generation: Generation
    logits: torch.Tensor


class FirstLogits(LogitsProcessor):
    """Keeps the logits from which the first token is chosen."""

    taken: torch.Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Keep the first ones."""
        if not hasattr(self, "taken"):
            self.taken = scores[0].clone()
        return scores


class RecordingEngine(BlendEngine):
    """Remembers the last prompt that the query engine sent, and the answer to it."""

    prompt: str | Sequence[int] = ""
    answer: Answer

    def generate(self, prompt: str | Sequence[int], *args: Any, **kwargs: Any) -> Generation:
        """Like `BlendEngine.generate`."""
        first = FirstLogits()
        generation = super().generate(prompt, *args, **kwargs, logits_processor=[first])
        self.prompt, self.answer = prompt, Answer(generation, first.taken)
        return generation


def run(model_dir: Path, own: Path | None, storage: Path, console: Console) -> list[dict[str, Answer]]:
    """Index documents, ask about them, show what comes.

    Args:
        model_dir: Directory of the model.
        own: A directory of texts; None: the Python language reference.
        storage: Where KV caches are kept, in a directory of its own for each collection.
        console: Where it is shown.

    Returns:
        For every question, the answer in each of `POLICIES`.

    Raises:
        OSError: There are no documents.
    """
    documents = load_documents(own)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    tokens = sum(len(tokenizer.encode(doc.text, verbose=False)) for doc in documents)
    console.print(
        f"[bold]{len(documents)} documents, {tokens:,} tokens[/], from {own or 'the Python language reference'}; "
        f"model {model_dir.name}, float32, {torch.get_num_threads()} threads"
    )
    ours, published = make_engines(model, tokenizer, storage / _name_of(documents))
    with ours, published:
        index = build_index(documents, tokenizer)
        llm = BlendLLM(engine=ours, max_new_tokens=ANSWER_TOKENS, generate_kwargs={"do_sample": False})
        ingest(llm, index, console)
        questions = questions_for(documents) if own else QUESTIONS
        rows = [ask(question, index, llm, ours, published, console) for question in questions]
    show_medians(rows, console)
    return rows


def _name_of(documents: list[Doc]) -> str:
    return hashlib.sha256("\n".join(doc.title for doc in documents).encode()).hexdigest()[:12]


def make_engines(model: PreTrainedModel, tokenizer: Any, storage: Path) -> tuple[RecordingEngine, BlendEngine]:
    """On one model and one store: our default, and CacheBlend as published (hkvd, 15 %, unprimed)."""
    # Each way of answering does its own work: nothing is taken from earlier prompts, and no clock picks another way.
    own_work: dict[str, Any] = {"prefix_cache_bytes": 0, "reuse_when": "possible"}
    ours = RecordingEngine(model, tokenizer, storage, **own_work)
    published = BlendEngine(model, tokenizer, storage, selector="hkvd", recompute_ratio=0.15, prime="none", **own_work)
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


def ingest(llm: BlendLLM, index: VectorStoreIndex, console: Console) -> None:
    """Prefill the chunks of the index."""
    report = llm.attach(index, show_progress=not console.quiet)
    if report.chunks:
        console.print(
            f"[bold]Indexed[/]: {report.chunks} chunks prefilled once, in {report.seconds:.0f} s "
            f"({report.tokens / report.seconds:.0f} tokens/s), {report.bytes / 1e6:.0f} MB of caches"
        )
    if report.skipped:
        console.print(f"[bold]Reused[/]: the caches of {report.skipped} chunks were in the store already")


def ask(
    question: str,
    index: VectorStoreIndex,
    llm: BlendLLM,
    ours: RecordingEngine,
    published: BlendEngine,
    console: Console,
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
    show(question, answers, console)
    return answers


def answer(engine: BlendEngine, prompt: str | Sequence[int], **how: Any) -> Answer:
    """Answer a prompt without being recorded."""
    first = FirstLogits()
    generation = BlendEngine.generate(  # not the recording one
        engine, prompt, ANSWER_TOKENS, add_special_tokens=False, do_sample=False, logits_processor=[first], **how
    )
    return Answer(generation, first.taken)


def numbers_table(title: str, *columns: str) -> Table:
    """A table of numbers; its first column says of what."""
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


def show(question: str, answers: dict[str, Answer], console: Console) -> None:
    """Figures and texts of the answers to one question."""
    full = answers["full prefill"]
    title = f"\n[bold]{escape(printable(question))}[/]"
    table = numbers_table(title, "TTFT", "gain", "KL", "reused", "recomputed", "fresh")
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
        console.print(f"  [cyan]{name}:[/] {escape(printable(' '.join(result.generation.text.split())))}")


def medians(rows: list[dict[str, Answer]]) -> dict[str, dict[str, float]]:
    """Per policy, over the questions: prompt tokens, seconds to the first token, gain, KL, share recomputed."""
    return {name: _medians_of(name, rows) for name in POLICIES}


def _medians_of(name: str, rows: list[dict[str, Answer]]) -> dict[str, float]:
    stats = [row[name].generation.stats for row in rows]
    full = [row["full prefill"] for row in rows]
    measured: dict[str, list[float]] = {
        "prompt_tokens": [s.prompt_tokens for s in stats],
        "ttft_s": [s.ttft_s for s in stats],
        "gain": [base.generation.stats.ttft_s / s.ttft_s for base, s in zip(full, stats, strict=True)],
        "kl": [kl(base.logits, row[name].logits) for base, row in zip(full, rows, strict=True)],
        "recompute_ratio": [s.recompute_ratio for s in stats],
    }
    return {what: statistics.median(values) for what, values in measured.items()}


def show_medians(rows: list[dict[str, Answer]], console: Console) -> None:
    """The last table."""
    title = f"\n[bold]Medians over {len(rows)} questions[/] (recomputed: a selector's own passes are charged)"
    table = numbers_table(title, "prompt tokens", "TTFT", "gain", "KL of first token", "recomputed")
    for name, median in medians(rows).items():
        table.add_row(
            name,
            f"{median['prompt_tokens']:.0f}",
            f"{median['ttft_s']:.2f} s",
            f"{median['gain']:.1f}x",
            f"{median['kl']:.4f}",
            "-" if name == "full prefill" else f"{median['recompute_ratio']:.1%}",
        )
    console.print(table)
