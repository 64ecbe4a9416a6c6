"""Hints from LlamaIndex's two event systems: what is indexed, and what is about to stand in a prompt."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.llms.rag_blend.nodes import document_of, ingest_nodes, prompt_text
from llama_index.llms.rag_blend.write_through import WriteThrough
from llama_index_instrumentation.base import BaseEvent

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM

logger = logging.getLogger(__name__)


class BlendCallbackHandler(BaseCallbackHandler, BaseEventHandler):
    """Caches nodes when they are parsed, fetches their caches when they are retrieved, and learns by answering.

    Both event systems take it: `CallbackManager([handler])` sees parsing and retrieval,
    `get_dispatcher().add_event_handler(handler)` all retrievals of the process. These are hints; reuse does not
    depend on them. No trouble of theirs reaches the application.

    On retrieval, caches in a far storage are fetched at once. Texts that were retrieved and are not cached are cached
    after the answer, when the model is idle, at most 1,024 at a time; `llm.engine.wait_for_ingestion()` waits for that.

    Example:
        ```python
        Settings.callback_manager = CallbackManager([BlendCallbackHandler(llm)])
        ```
    """

    event_starts_to_ignore: tuple[CBEventType, ...] = ()
    event_ends_to_ignore: tuple[CBEventType, ...] = ()
    precompute: bool = True
    prefetch: bool = True

    _llm: "BlendLLM" = PrivateAttr()
    _write_through: WriteThrough | None = PrivateAttr()

    def __init__(
        self, llm: "BlendLLM", precompute: bool = True, prefetch: bool = True, write_through: bool = True
    ) -> None:
        """Make a handler; it does nothing until one of the event systems has it.

        Args:
            llm: Whose engine caches.
            precompute: Cache nodes when a node parser has made them, behind the head of the default query engine.
            prefetch: Fetch the caches of retrieved nodes.
            write_through: Cache retrieved nodes that are not cached yet.
        """
        BaseEventHandler.__init__(self, precompute=precompute, prefetch=prefetch)  # type: ignore[call-arg]
        self._llm = llm
        self._write_through = WriteThrough(llm) if write_through else None
        if self._write_through is not None:
            llm.handle.listeners.add(self._write_through)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this handler."""
        return "BlendCallbackHandler"

    # -- CallbackManager --

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **kwargs: object
    ) -> None:
        """Take the nodes of a parsing or a retrieval.

        Args:
            event_type: What has ended.
            payload: Its nodes.
            event_id: Not used.
            **kwargs: Not used.
        """
        nodes = (payload or {}).get(EventPayload.NODES)
        if not nodes:
            return
        if event_type == CBEventType.NODE_PARSING and self.precompute:
            _as_a_favour(self._parsed, nodes)
        elif event_type == CBEventType.RETRIEVE:
            _as_a_favour(self._retrieved, nodes)

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: object,
    ) -> str:
        """Do nothing.

        Args:
            event_type: Not used.
            payload: Not used.
            event_id: The event.
            parent_id: Not used.
            **kwargs: Not used.

        Returns:
            `event_id`.
        """
        return event_id

    def start_trace(self, trace_id: str | None = None) -> None:
        """Do nothing."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Do nothing."""

    # -- dispatcher --

    def handle(self, event: BaseEvent, **kwargs: object) -> None:
        """Take the nodes of a retrieval.

        Args:
            event: Any event.
            **kwargs: Not used.
        """
        if isinstance(event, RetrievalEndEvent):
            _as_a_favour(self._retrieved, event.nodes)

    # -- what is done --

    def _parsed(self, nodes: Sequence[BaseNode]) -> None:
        if not _in_event_loop():
            ingest_nodes(self._llm, nodes, self._llm.head())
            return
        # An event loop must not wait for a prefill.
        texts = {text: document_of(node) for node in nodes if (text := prompt_text(node))}
        head = self._llm.head()
        self._llm.handle.heads.add(head)
        waiting = self._llm.engine.ingest_later(list(texts), head=head, doc_ids=list(texts.values()))
        if waiting < len(texts):
            logger.warning("%d nodes are not cached: too many at once. Attach the index.", len(texts) - waiting)

    def _retrieved(self, hits: Sequence[NodeWithScore]) -> None:
        nodes = [hit.node for hit in hits]
        if self._write_through is not None:
            self._write_through.retrieved(nodes)
        if self.prefetch and self._llm.handle.is_loaded:  # loading a model is more than a hint may cost
            self._llm.engine.prefetch([text for node in nodes if (text := prompt_text(node))])


def _as_a_favour(action: Callable[[Any], None], nodes: object) -> None:
    try:
        action(nodes)
    except Exception as error:
        logger.warning("A hint from LlamaIndex was of no use (%s: %s)", type(error).__name__, error)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
