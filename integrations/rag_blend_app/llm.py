"""The LLM that answers from a collection."""

from __future__ import annotations

from typing import Any

from llama_index.llms.rag_blend import BlendLLM
from transformers.utils.logging import disable_progress_bar

from rag_blend import read_model_info
from rag_blend_app.collection import Facts


def llm_for(facts: Facts, store: str, max_new_tokens: int = 256, **engine_options: Any) -> BlendLLM:
    """An LLM that answers greedily. Its model is loaded when it is first needed.

    Args:
        facts: Of the collection.
        store: Directory or URL of the KV caches.
        max_new_tokens: Longest answer.
        engine_options: More for `BlendEngine.from_pretrained`; None: its default.

    Raises:
        FileNotFoundError: There is no such model.
    """
    try:
        read_model_info(facts.model)  # now, not when documents have been read
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"there is no model {facts.model!r}, neither here nor on the hub: {error}") from error
    engine_options |= {"on_unsupported": facts.on_unsupported, "exact_first": facts.exact_first}
    disable_progress_bar()  # of loading weights: noise between our own
    return BlendLLM(
        facts.model,
        storage=store,
        namespace=facts.namespace,
        max_new_tokens=max_new_tokens,
        engine_options={name: value for name, value in engine_options.items() if value is not None},
        generate_kwargs={"do_sample": False},
    )
