"""Engine results -> LangChain's usage and metadata. Plain Python values only, never a tensor."""

import dataclasses
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from rag_blend import GenerationStats


def usage(stats: GenerationStats, completion_tokens: int) -> UsageMetadata:
    """Return the token usage; what was taken from caches is `cache_read`.

    Args:
        stats: What the engine measured.
        completion_tokens: Number of generated tokens.
    """
    return UsageMetadata(
        input_tokens=stats.prompt_tokens,
        output_tokens=completion_tokens,
        total_tokens=stats.prompt_tokens + completion_tokens,
        input_token_details=InputTokenDetails(cache_read=stats.prefix_tokens + stats.reused_tokens),
    )


def metadata(model_name: str, stats: GenerationStats) -> dict[str, Any]:
    """Return the response metadata: the model's name, and all the engine's figures."""
    return {"model_name": model_name, "model_provider": "rag_blend", "rag_blend": dataclasses.asdict(stats)}
