"""An ingestion pipeline's last step: cache what the nodes will be in a prompt."""

import hashlib
import json
import logging
import multiprocessing
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

import torch
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.rag_blend.nodes import ingest_nodes
from rag_blend_frameworks.threads import call_in_thread

if TYPE_CHECKING:
    from llama_index.llms.rag_blend.base import BlendLLM

logger = logging.getLogger(__name__)


class PrecomputeKV(TransformComponent):
    """Caches the texts of nodes and passes the nodes on as they are.

    Put it behind everything that changes text or metadata. A cache that cannot be written costs time, not the
    pipeline: a warning says so. It sees no deletions; a `BlendVectorStore` as the pipeline's vector store does.

    With `num_workers`, every worker loads the model by its name and writes to the same storage, which must not be one
    in memory. An engine that was made before in this process learns of their work by `llm.engine.refresh()`.

    Example:
        ```python
        pipeline = IngestionPipeline(transformations=[SentenceSplitter(), PrecomputeKV(llm), embed_model])
        ```
    """

    fingerprint: str = Field(
        description="Of model, storage and head: the pipeline's cache must not pass over nodes cached for another."
    )

    _llm: "BlendLLM" = PrivateAttr()
    _head: list[int] = PrivateAttr()

    def __init__(
        self,
        llm: "BlendLLM",
        head: str | Sequence[int] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        engine: object = None,
    ) -> None:
        """Prepare; the model is loaded when the first nodes come.

        Args:
            llm: Whose engine caches the nodes.
            head: See `BlendLLM.attach`, like the other two.
            text_qa_template: See `BlendLLM.attach`.
            engine: See `BlendLLM.attach`.
        """
        ids = llm.head_of(head, text_qa_template, engine)
        super().__init__(fingerprint=_fingerprint(llm, ids))  # type: ignore[call-arg]  # a field of ours
        self._llm = llm
        self._head = ids

    @classmethod
    def class_name(cls) -> str:
        """Return the name used in serialised components and in the pipeline's cache."""
        return "PrecomputeKV"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: object) -> Sequence[BaseNode]:
        """Cache the nodes' texts.

        Args:
            nodes: The nodes.
            **kwargs: Not used.

        Returns:
            The same nodes.
        """
        if isinstance(multiprocessing.current_process(), ForkProcess):
            torch.set_num_threads(1)  # OpenMP hangs in a forked process whose parent has computed
        try:
            ingest_nodes(self._llm, nodes, self._head)
        except Exception as error:
            logger.warning(
                "Caching %d nodes failed (%s: %s). Their answers come from a full prefill.",
                len(nodes), type(error).__name__, error,
            )  # fmt: skip
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Cache the nodes' texts beside the event loop.

        Args:
            nodes: The nodes.
            **kwargs: Not used.

        Returns:
            The same nodes.
        """
        return await call_in_thread(lambda: self(nodes, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle configuration and head only; the copy loads its own engine.

        Raises:
            TypeError: The LLM was built from an engine object, which cannot travel to another process.
        """
        return {"llm": self._llm, "head": self._head, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild from the configuration, without reading anything of the model."""
        super().__init__(fingerprint=state["fingerprint"])  # type: ignore[call-arg]
        self._llm, self._head = state["llm"], state["head"]


def _fingerprint(llm: "BlendLLM", head: Sequence[int]) -> str:
    """Digest what decides whether a node's cache is the one that will be looked for."""
    facts = [llm.metadata.model_name, llm.storage, llm.namespace, llm.prime, repr(sorted(llm.engine_options.items()))]
    return hashlib.sha256(json.dumps([*facts, list(head)]).encode()).hexdigest()
