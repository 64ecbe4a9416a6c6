"""Knowledge of model families. A family that differs from `base` gets one file named after its `model_type`."""

from __future__ import annotations

import importlib
from typing import cast

from transformers import PreTrainedModel

from rag_blend.models.base import ModelAdapter, cache_argument_of, describe, lock_of
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
]


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """The adapter of the model's family: `models/<model_type>.py` if there is one, else the common one.

    Raises:
        UnsupportedModelError: The model cannot be blended.
    """
    name = f"rag_blend.models.{model.config.model_type}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ModelAdapter(model)
    return cast(ModelAdapter, module.Adapter(model))
