"""LlamaIndex call arguments -> arguments of `BlendEngine.generate`."""

from collections.abc import Mapping
from typing import Any

from rag_blend_frameworks.options import merged_options


def generation_options(defaults: Mapping[str, Any], call: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """Merge constructor defaults and per-call arguments into engine arguments.

    Args:
        defaults: `generate_kwargs` of the constructor.
        call: Arguments of this call; they win. None means "not given".
        max_new_tokens: Used when neither side gives `max_new_tokens` or `max_tokens`.

    Returns:
        Keyword arguments for `BlendEngine.generate` and `BlendEngine.stream`.
    """
    merged = {"max_new_tokens": max_new_tokens, **merged_options(defaults, call)}
    if isinstance(merged.get("stop"), str):
        merged["stop"] = [merged["stop"]]
    return merged
