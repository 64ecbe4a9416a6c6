"""Hunyuan's keys are scaled behind RoPE: what cannot be taken back is refused by name."""

from __future__ import annotations

import pytest
import torch
from conftest import random_model
from transformers import AutoModelForCausalLM

from rag_blend import UnsupportedModelError
from rag_blend.models import ModelAdapter, adapter_for
from rag_blend.selftest import check_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype: torch.dtype) -> None:
    check_model(adapter_for(random_model("hunyuan_v1_dense").to(dtype)))


def test_the_common_adapter_does_not_do() -> None:
    """Else `random_model`'s weights would not show what the family's own one is for."""
    with pytest.raises(UnsupportedModelError, match="moving the keys of layer 0 differs"):
        check_model(ModelAdapter(random_model("hunyuan_v1_dense")))


def test_forgetting_the_scale_where_keys_are_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_for(random_model("hunyuan_v1_dense"))
    monkeypatch.setattr(type(adapter), "add_rotated", ModelAdapter.add_rotated)
    with pytest.raises(UnsupportedModelError, match="adding to the keys of layer 0 differs"):
        check_model(adapter)


def test_a_weight_of_zero_is_refused() -> None:
    model = random_model("hunyuan_v1_dense")
    with torch.no_grad():
        model.get_decoder().layers[1].self_attn.key_layernorm.weight[3] = 0.0
    with pytest.raises(UnsupportedModelError, match="moving the keys of layer 1 differs"):
        check_model(adapter_for(model))


def test_weights_that_are_not_in_memory_are_refused() -> None:
    config = random_model("hunyuan_v1_dense").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"model_type 'hunyuan_v1_dense'.*not in memory"):
        adapter_for(model)
