"""Retrieved text is prefilled once, when it is indexed, and not again for every question."""

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
