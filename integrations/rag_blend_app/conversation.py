"""Questions to a collection, one after the other, with the answers to the earlier ones in mind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.schema import MetadataMode
from llama_index.llms.rag_blend import BlendLLM
from llama_index.llms.rag_blend.messages import render_chat
from rag_blend_frameworks.prompts import Prompt, token_ids

from rag_blend_app.collection import Collection

PROMPT = ChatPromptTemplate(
    [
        ChatMessage(
            role=MessageRole.SYSTEM,
            content="Answer the question in a few sentences, using only the text below.\n\n{context_str}",
        ),
        ChatMessage(role=MessageRole.USER, content="{query_str}"),
    ]
)
"""Attach with it (``text_qa_template``), so that chunks are cached behind the head they will have."""


@dataclass(frozen=True)
class Source:
    """A chunk that an answer was given from.

    Attributes:
        document: Its document's path.
        text: The chunk.
        score: How much it resembles the question, at most 1.
    """

    document: str
    text: str
    score: float


@dataclass
class Reply:
    """An answer, or what is there of it yet.

    Attributes:
        question: The question.
        sources: The chunks in the prompt, best first.
        text: The answer so far.
        figures: `BlendLLM`'s own of the answer, once it is complete: tokens by kind, times, a note.
    """

    question: str
    sources: list[Source]
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Conversation:
    """Questions and answers. The chunks in the prompt are those of the latest question.

    Args:
        collection: Where chunks are found.
        llm: Who answers.
        top_k: Chunks per prompt.
    """

    def __init__(self, collection: Collection, llm: BlendLLM, top_k: int) -> None:
        self._collection = collection
        self.llm = llm
        self._top_k = top_k
        self._turns: list[tuple[ChatMessage, ChatMessage]] = []

    def look_up(self, question: str) -> Reply:
        """Find the chunks for a question; `answer` goes on from there.

        Raises:
            ValueError: The question is empty.
        """
        question = question.strip()
        if not question:
            raise ValueError("the question is empty")
        # A question such as "And why?" resembles nothing without the one before it.
        before = [str(asked.content) for asked, _ in self._turns[-1:]]
        hits = self._collection.retrieve("\n".join([*before, question]), self._top_k)
        return Reply(
            question,
            [
                Source(str(hit.node.ref_doc_id), hit.node.get_content(MetadataMode.LLM), float(hit.score or 0))
                for hit in hits
            ],
        )

    def answer(self, reply: Reply, reuse: bool = True) -> Iterator[str]:
        """Yield the answer piece by piece and complete the reply. Closed early, it computes and remembers nothing more.

        Args:
            reply: What `look_up` gave.
            reuse: False: by full prefill, for comparison.

        Raises:
            RagBlendError: The prompt does not fit the context window, say.
        """
        context = "\n\n".join(source.text.strip() for source in reply.sources)
        front, asked = PROMPT.format_messages(context_str=context, query_str=reply.question)
        messages = [front, *self._history(front, asked), asked]
        with closing(self.llm.stream_chat(messages, reuse=reuse)) as pieces:
            for piece in pieces:
                reply.text += piece.delta or ""
                reply.figures = (piece.raw or {}).get("rag_blend", {})
                yield piece.delta or ""
        if not reuse:
            reply.figures["note"] = "answered by full prefill: no cache was used"
        self._turns.append((asked, ChatMessage(role=MessageRole.ASSISTANT, content=reply.text)))

    def _history(self, front: ChatMessage, asked: ChatMessage) -> list[ChatMessage]:
        """The latest turns that fit between these messages into a prompt that leaves room for its answer."""
        facts = self.llm.metadata
        kept: list[ChatMessage] = []
        for turn in reversed(self._turns):
            longer = [*turn, *kept]
            if self._length([front, *longer, asked]) > facts.context_window - facts.num_output:
                break
            kept = longer
        return kept

    def _length(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of a prompt, those of the chat template included."""
        tokenizer = self.llm.engine.tokenizer
        if tokenizer.chat_template:
            return len(token_ids(tokenizer, render_chat(tokenizer, messages, {})))
        return len(token_ids(tokenizer, Prompt(messages_to_prompt(messages))))
