"""Retrieved texts that are cached after the answer, behind the very text that stood in front of them."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode
from llama_index.llms.rag_blend.head import head_ids
from llama_index.llms.rag_blend.nodes import document_of, prompt_text
from rag_blend_frameworks.prompts import Prompt

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM

logger = logging.getLogger(__name__)

_MAX_TEXTS = 256  # retrieved and not yet seen in a prompt
_MAX_SEEN = 4096

Head = tuple[int, ...]


class WriteThrough:
    """Caches what was retrieved, when the model is idle, for the prompts that really come.

    A retriever knows texts but no prompt, the LLM a prompt but no texts; here both meet. The text in front of the
    first retrieved one is the head. A head that nothing was cached behind yet is believed when it comes a second
    time: that of a refine step holds the question, and would be of no use again.

    Thread-safe.
    """

    def __init__(self, llm: "BlendLLM") -> None:
        """Start with nothing retrieved."""
        self._llm = llm
        self._lock = threading.Lock()
        self._retrieved: OrderedDict[str, str] = OrderedDict()  # text -> document
        self._offered: OrderedDict[tuple[Head, str], None] = OrderedDict()
        self._heads: OrderedDict[Head, None] = OrderedDict()

    def retrieved(self, nodes: Iterable[BaseNode]) -> None:
        """Remember texts that will soon stand in a prompt."""
        with self._lock:
            for node in nodes:
                text = prompt_text(node)
                if text:
                    _put(self._retrieved, text, document_of(node), _MAX_TEXTS)

    def answered(self, prompt: Prompt) -> None:
        """Have the retrieved texts of an answered prompt cached. Never raises: nobody asked for it."""
        try:
            self._answered(prompt)
        except Exception as error:
            logger.warning("Retrieved texts could not be cached (%s: %s)", type(error).__name__, error)

    def _answered(self, prompt: Prompt) -> None:
        with self._lock:
            found = {text: doc for text, doc in self._retrieved.items() if text in prompt.text}
        if not found:
            return
        front = prompt.text[: min(prompt.text.index(text) for text in found)]
        engine = self._llm.engine
        head = tuple(head_ids(engine.tokenizer, lambda context: prompt._replace(text=front + context)))
        with self._lock:
            if not self._is_believed(head):
                return
            new = {text: doc for text, doc in found.items() if (head, text) not in self._offered}
        if engine.ingest_later(list(new), head=head, doc_ids=list(new.values())) < len(new):
            return  # the queue is full: another time
        self._llm.handle.heads.add(head)
        with self._lock:
            for text in new:
                _put(self._offered, (head, text), None, _MAX_SEEN)

    def _is_believed(self, head: Head) -> bool:
        believed = head in self._heads or head in self._llm.handle.heads or head == tuple(self._llm.head())
        _put(self._heads, head, None, _MAX_TEXTS)
        return believed


def _put(table: OrderedDict[Any, Any], key: object, value: object, limit: int) -> None:
    """Put an entry last, and drop the first when there are too many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)
