"""Quantised weights: they blend, or the self-test refuses them by name, and what they are scaled with is in the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from exactness import HEAD, QUESTION, assert_close, full_logits, prompt_of
from transformers import PreTrainedModel

from rag_blend import BlendEngine, UnsupportedModelError
from rag_blend.fingerprint import fingerprint_of

TEXTS = [random_text(seed) for seed in range(4)]


class Int8Linear(torch.nn.Module):
    """Weights as bitsandbytes keeps them: integers, scaled by a tensor that only the state dict shows."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weight * self.scale)


class Int8RowsLinear(Int8Linear):
    """One that rounds its input, too, by the largest number of all rows: a row's result depends on the others."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().max() / 127
        return super().forward((rows / scale).round() * scale)


def quantised(kind: type[Int8Linear], scaled: float = 1.0) -> PreTrainedModel:
    model = random_model()
    for layer in model.get_decoder().layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = kind(getattr(layer.mlp, name))
            linear.scale = linear.scale * scaled
            setattr(layer.mlp, name, linear)
    return model


def weights_digest(model: PreTrainedModel) -> str:
    return fingerprint_of(model, small_tokenizer(), torch.float32).weights


def assert_blends(model: PreTrainedModel) -> None:
    with BlendEngine(model, small_tokenizer(), None, prime="none", kv_dtype=torch.float32) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        for texts, options in ((TEXTS[1:], {"recompute_ratio": 1.0}), (TEXTS[:1], {"recompute_ratio": 0.0})):
            ids = prompt_of(engine, HEAD, texts, QUESTION)
            prefill = engine.prefill(ids, **options)
            assert prefill.stats.hits >= 2
            assert_close(prefill.logits, full_logits(model, ids))


def test_quantised_weights_blend() -> None:
    assert_blends(quantised(Int8Linear))


def test_quantised_activations_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* differs from the model's own result"):
        BlendEngine(quantised(Int8RowsLinear), small_tokenizer(), None)


def test_the_same_integers_scaled_otherwise_are_another_model() -> None:
    first = weights_digest(quantised(Int8Linear))
    assert weights_digest(quantised(Int8Linear)) == first
    assert weights_digest(quantised(Int8Linear, 2.0)) != first


def test_torchao() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    models = [random_model(seed=seed) for seed in (0, 0, 1)]
    for model in models:
        quantize_(model, Int8WeightOnlyConfig())
    digests = [weights_digest(model) for model in models]
    assert digests[0] == digests[1] != digests[2]
    assert_blends(models[0])
