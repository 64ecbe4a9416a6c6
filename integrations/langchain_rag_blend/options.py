"""LangChain call arguments -> arguments of `BlendEngine.generate`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rag_blend_frameworks.options import merged_options

# LangChain's own, which describe a call to its tracers or choose between endpoints.
_NOT_FOR_THE_ENGINE = frozenset({"stream", "strict", "parallel_tool_calls", "ls_structured_output_format"})


def generation_options(
    defaults: Mapping[str, Any], call: Mapping[str, Any], stop: Sequence[str] | str | None
) -> dict[str, Any]:
    """Merge constructor defaults and per-call arguments into engine arguments.

    Args:
        defaults: Those of the constructor, `max_tokens` and `stop` among them.
        call: Arguments of this call or of `bind`; they win. None means "not given".
        stop: This call's stop strings; None: the constructor's.

    Returns:
        Keyword arguments for `BlendEngine.generate` and `BlendEngine.stream`.
    """
    merged = merged_options(*(_for_the_engine(options) for options in (defaults, call)))
    words = merged.get("stop") if stop is None else stop
    merged["stop"] = [words] if isinstance(words, str) else list(words or ())
    return merged


def _for_the_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _NOT_FOR_THE_ENGINE}
