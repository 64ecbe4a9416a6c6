"""What one engine's prompts have as context: which documents were retrieved, and what stands in front of them.

Chains are opaque: nothing tells the model which part of its prompt was retrieved. But whoever retrieves can leave a
note, and the text of a document is found again in the next prompt; what stands in front of the first one is the head.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from langchain_core.documents import Document
from rag_blend_frameworks.prompts import Prompt, token_ids

from langchain_rag_blend.head import head_ids
from rag_blend import BlendEngine, GenerationStats

logger = logging.getLogger(__name__)

_MAX_NOTES = 256  # documents; those of the next few prompts
_MAX_HEADS = 4


class Contexts:
    """Notes on retrieved documents, and heads, of all users of one engine. Thread-safe."""

    def __init__(self) -> None:
        """Know nothing."""
        self.head: tuple[int, ...] | None = None
        """What ingestion caches behind unless told otherwise, in token ids; None: any head."""
        self._heads = HeadMemory()
        self._notes: OrderedDict[str, str] = OrderedDict()  # stripped text -> document id
        self._lock = threading.Lock()

    def retrieved(self, documents: Iterable[Document]) -> None:
        """Note documents that are likely to stand in the next prompt, so that they are cached after it."""
        with self._lock:
            for document in documents:
                text = document.page_content.strip()
                self._notes[text] = document.id or self._notes.get(text, "")
                self._notes.move_to_end(text)
            while len(self._notes) > _MAX_NOTES:
                self._notes.popitem(last=False)

    def deleted(self, ids: Iterable[str]) -> None:
        """Drop the notes on documents that are not to be cached any more."""
        gone = set(ids)
        with self._lock:
            for text in [text for text, id_ in self._notes.items() if id_ in gone]:
                del self._notes[text]

    def answered(self, engine: BlendEngine, prompt: Prompt, stats: GenerationStats) -> None:
        """Have the noted documents of a prompt cached when the model is idle, behind the prompt's own head.

        Never raises: a missing cache only costs time.
        """
        found = self._found_in(prompt.text)
        # The head counts as a hit, too. Where it is too short for that, what is cached already is found so again.
        if not found or (stats.hits > len(found) and not stats.misses):
            return
        try:
            engine.ingest_later(
                [text for _, text, _ in found],
                head=self._head_for(engine, prompt._replace(text=prompt.text[: min(found)[0]])),
                doc_ids=[id_ for *_, id_ in found],
            )
        except Exception as error:
            logger.warning("%d retrieved documents cannot be cached: %s", len(found), error)

    def _found_in(self, text: str) -> list[tuple[int, str, str]]:
        """Noted documents that stand in a text: where, their text, their id."""
        with self._lock:
            notes = list(self._notes.items())
        return [(at, note, id_) for note, id_ in notes if note and (at := text.find(note)) >= 0]

    def _head_for(self, engine: BlendEngine, before: Prompt) -> Sequence[int] | None:
        """The head to cache behind: the given one if the prompt begins with it, else one that is learned."""
        given = self.head
        if given is not None:
            if tuple(token_ids(engine.tokenizer, before)[: len(given)]) == given:
                return given
            self._heads.warn_of_change()
        text = self._heads.learn(before.text)
        return head_ids(engine.tokenizer, before._replace(text=text)) or None if text else None


class HeadMemory:
    """Learns what prompts begin with from the text in front of their first document.

    That text may end in something that belongs to the document (a title, by a `document_prompt`) or hold something
    of the question. Whole lines that prompts share are kept.
    """

    def __init__(self) -> None:
        """Know no head."""
        self._known: list[str] = []
        self._complained: set[str] = set()
        self._lock = threading.Lock()

    def learn(self, before: str) -> str | None:
        """Return the head of a prompt.

        Args:
            before: What stands in front of its first document.

        Returns:
            The beginning of `before` that other prompts have too, as far as is known; None when prompts have too
            little in common.
        """
        lines = _whole_lines(before)
        with self._lock:
            fitting = [known for known in self._known if lines.startswith(known)]
            if fitting:
                return max(fitting, key=len)
            shared = max((_shared_lines(lines, known) for known in self._known), key=len, default="")
            head = shared if 2 * len(shared) >= len(lines) else lines
            if head and len(self._known) < _MAX_HEADS:
                self._known.append(head)
                return head
            if head:
                self._complain(
                    "What stands in front of the retrieved documents differs from prompt to prompt, so they are cached "
                    "for any head, which is a little less faithful. Put the question and the history behind them."
                )
            return None

    def warn_of_change(self) -> None:
        """Say, once, that prompts do not begin as was announced."""
        with self._lock:
            self._complain(
                "A prompt does not begin with the head that the documents were cached behind, so they are not reused "
                "in it: the template, its tools or the system message have changed. Its documents are now cached "
                "behind what it begins with; call learn_head with the new template, and add the documents again."
            )

    def _complain(self, text: str) -> None:
        if text not in self._complained:
            self._complained.add(text)
            logger.warning(text)


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _shared_lines(left: str, right: str) -> str:
    pairs = zip(left.splitlines(keepends=True), right.splitlines(keepends=True), strict=False)
    return "".join(line for line, other in takewhile(lambda pair: pair[0] == pair[1], pairs))
