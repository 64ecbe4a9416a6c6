"""What of a node is cached, and under which document it is filed."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode, MetadataMode

from rag_blend import IngestReport

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM


def prompt_text(node: BaseNode) -> str:
    """Return exactly what the response synthesizer puts in the prompt, metadata lines included."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def document_of(node: BaseNode) -> str:
    """Return the id of the document that a node was cut from."""
    return node.ref_doc_id or node.node_id


def ingest_nodes(
    llm: "BlendLLM", nodes: Iterable[BaseNode], head: Sequence[int], progress: bool = False, suffix: str = ""
) -> IngestReport:
    """Cache the texts of nodes behind a head.

    Args:
        llm: Whose engine caches them.
        nodes: The nodes; those without text are passed over.
        head: Token ids in front of the context.
        progress: Show a progress bar.
        suffix: Put behind the document ids that the chunks are filed under.

    Returns:
        What was cached.

    Raises:
        OSError: The storage refused.
    """
    texts, docs = [], []
    for node in nodes:
        text = prompt_text(node)
        if text:
            texts.append(text)
            docs.append(document_of(node) + suffix)
    llm.handle.heads.add(head)
    return llm.engine.ingest(texts, head=head, doc_ids=docs, progress=progress and bool(texts))


def total(reports: Iterable[IngestReport]) -> IngestReport:
    """Add up what several ingestions did."""
    done = list(reports)
    return IngestReport(
        chunks=sum(report.chunks for report in done),
        tokens=sum(report.tokens for report in done),
        bytes=sum(report.bytes for report in done),
        skipped=sum(report.skipped for report in done),
        seconds=sum(report.seconds for report in done),
    )
