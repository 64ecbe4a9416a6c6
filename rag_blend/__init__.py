"""Retrieved text is prefilled once, when it is indexed, and not again for every question."""

from rag_blend.engine import BlendEngine, ForgetReport, Prefill
from rag_blend.errors import (
    GenerationCancelledError,
    PromptTooLongError,
    RagBlendError,
    UnsupportedModelError,
)
from rag_blend.generation import Generation, GenerationStats, TextStream
from rag_blend.info import ModelInfo, read_model_info
from rag_blend.ingest import IngestReport
from rag_blend.selectors import AttentionSelector, ScoreSelector, TokenSelector
from rag_blend.storage import StorageBackend

__version__ = "0.1.0"

__all__ = [
    "AttentionSelector",
    "BlendEngine",
    "ForgetReport",
    "Generation",
    "GenerationCancelledError",
    "GenerationStats",
    "IngestReport",
    "ModelInfo",
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
