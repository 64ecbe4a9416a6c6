"""Retrieved text is prefilled once, when it is indexed, and not again for every question."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_blend.engine import BlendEngine, ForgetReport
    from rag_blend.errors import (
        GenerationCancelledError,
        PromptTooLongError,
        RagBlendError,
        UnsupportedModelError,
    )
    from rag_blend.generation import Generation, GenerationStats, Prefill, TextStream
    from rag_blend.info import ModelInfo, read_model_info
    from rag_blend.ingest import IngestReport
    from rag_blend.policy import PolicyInfo
    from rag_blend.selectors import AttentionSelector, ScoreSelector, TokenSelector
    from rag_blend.shadow import DriftReport
    from rag_blend.storage import StorageBackend

__version__ = "0.1.0"

__all__ = [
    "AttentionSelector",
    "BlendEngine",
    "DriftReport",
    "ForgetReport",
    "Generation",
    "GenerationCancelledError",
    "GenerationStats",
    "IngestReport",
    "ModelInfo",
    "PolicyInfo",
    "Prefill",
    "PromptTooLongError",
    "RagBlendError",
    "ScoreSelector",
    "StorageBackend",
    "TextStream",
    "TokenSelector",
    "UnsupportedModelError",
    "__version__",
    "read_model_info",
]

# Imported when they are first asked for: torch and transformers take seconds, which `rag-blend --help`, and a
# program that only catches our errors, need not wait for.
_MODULES = {
    "engine": ("BlendEngine", "ForgetReport"),
    "errors": ("GenerationCancelledError", "PromptTooLongError", "RagBlendError", "UnsupportedModelError"),
    "generation": ("Generation", "GenerationStats", "Prefill", "TextStream"),
    "info": ("ModelInfo", "read_model_info"),
    "ingest": ("IngestReport",),
    "policy": ("PolicyInfo",),
    "selectors": ("AttentionSelector", "ScoreSelector", "TokenSelector"),
    "shadow": ("DriftReport",),
    "storage": ("StorageBackend",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
