"""Knowledge of model families. A family that differs from `base` gets one file named after its `model_type`."""

from __future__ import annotations

import importlib
from typing import cast

from transformers import PreTrainedModel

from rag_blend.errors import UnsupportedModelError
from rag_blend.models.base import ModelAdapter, cache_argument_of, describe, lock_of, what_else_than_text_to_text
from rag_blend.models.weights import WeightsWatch, adapter_state, bare_model

__all__ = [
    "ModelAdapter",
    "WeightsWatch",
    "adapter_for",
    "adapter_state",
    "bare_model",
    "cache_argument_of",
    "describe",
    "lock_of",
    "what_else_than_text_to_text",
]


def adapter_for(model: PreTrainedModel, windows: bool = False) -> ModelAdapter:
    """The adapter of the model's family: `models/<model_type>.py` if there is one, else the common one.

    Args:
        model: The model.
        windows: Whether its attention may slide.

    Raises:
        UnsupportedModelError: The model cannot be blended.
    """
    adapter = _adapter_class(model.config.model_type)(model)
    if adapter.slides and not windows:
        reason = f"{describe(model)} is not blended: its attention slides over {model.config.sliding_window} tokens."
        raise UnsupportedModelError(reason, calibratable=True)
    return adapter


def _adapter_class(model_type: str) -> type[ModelAdapter]:
    name = f"rag_blend.models.{model_type}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ModelAdapter
    return cast(type[ModelAdapter], module.Adapter)
