"""Which weights are at work: adapters (LoRA and kin) can be switched under an engine's feet."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_blend.errors import ModelChangedError, UnsupportedModelError

logger = logging.getLogger(__name__)

_CHANGED = (
    "the model's adapters or weights are not those that the engine was made with: until they are again, prompts are "
    "served by full prefill and nothing is ingested; engines made with different adapters can share model and storage"
)


def bare_model(model: Any) -> PreTrainedModel:
    """The transformers model inside a ``PeftModel``, adapters and all; any other model itself.

    Raises:
        UnsupportedModelError: The adapter puts tokens of its own in front of every prompt.
    """
    if not hasattr(model, "get_base_model"):
        bare: PreTrainedModel = model
        return bare
    if model.active_peft_config.is_prompt_learning:
        raise UnsupportedModelError(
            f"the adapter {model.active_peft_config.peft_type.value} puts virtual tokens in front of every prompt.",
            servable=False,
        )
    bare = model.get_base_model()
    return bare


def adapter_state(model: torch.nn.Module) -> list[Any]:
    """What decides which of a model's adapters are at work, module by module, as JSON can hold it; empty without any.

    Only PEFT's are known. The adapters' weights are parameters of the model like others.
    """
    return [[name, *_at_work(layer)] for name, layer in _adapted_modules(model)]


class WeightsWatch:
    """Notices that a model is not the one any more that it was.

    Told apart are the adapters that are at work, and parameters that were written to in place, as by training.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._adapted = [layer for _, layer in _adapted_modules(model)]
        self._state = self._now()
        self._warned = False

    def changed(self) -> bool:
        """Whether it differs now: then nothing that was computed before may be reused. Warns the first time."""
        changed = self._now() != self._state
        if changed and not self._warned:
            self._warned = True
            logger.warning(_CHANGED)
        return changed

    def require_same(self) -> None:
        """Before something is computed that will be reused.

        Raises:
            ModelChangedError: It differs.
        """
        if self._now() != self._state:
            raise ModelChangedError(_CHANGED)

    def _now(self) -> list[Any]:
        loaded = list(getattr(self._model, "peft_config", ()))  # PEFT notes there what it has put into the model
        writes = sum(0 if weight.is_inference() else weight._version for weight in self._parameters)
        return [loaded, writes, [_at_work(layer) for layer in self._adapted]]


def _at_work(layer: Any) -> list[Any]:
    merged, scaling = (getattr(layer, name, ()) for name in ("merged_adapters", "scaling"))
    return [list(layer.active_adapters), layer.disable_adapters, list(merged), sorted(dict(scaling).items())]


def _adapted_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    if "peft" not in sys.modules:  # then nobody has put an adapter into the model
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield name, module
