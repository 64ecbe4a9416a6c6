"""Layers that are prepared beside the model's own work: handed over in order, and the same rows on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from test_engine_storage import prompt_with

from rag_blend import BlendEngine
from rag_blend.streams import CopyLane

MakeEngine = Callable[..., BlendEngine]


def test_each_layer_is_taken_over_by_the_models_thread_before_it_is_used(
    make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.ingest(texts, progress=False)
    expected = engine.prefill(prompt_with(*texts)).logits
    handed_over: list[list[torch.Tensor]] = []
    taken_over: list[int] = []

    def hand_over(lane: CopyLane, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        kept = [tensor.clone() for tensor in tensors]
        handed_over.append(kept)
        number = len(handed_over)
        originals = list(tensors)
        for tensor in originals:
            tensor.fill_(7.0)  # not finished yet

        def take_over() -> None:
            taken_over.append(number)
            for tensor, finished in zip(originals, kept, strict=True):
                tensor.copy_(finished)

        return take_over

    monkeypatch.setattr(CopyLane, "hand_over", hand_over)
    assert torch.equal(engine.prefill(prompt_with(*texts)).logits, expected)
    assert taken_over == [1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("selector", ["none", "heads", "hkvd", "anchor"])
def test_a_gpu_gets_the_same_rows(selector: str) -> None:
    texts = [random_text(seed, 300) for seed in range(4)]
    logits = []
    for device in ("cpu", "cuda"):
        model = random_model().to(device)
        with BlendEngine(model, small_tokenizer(), None, selector, prime="none", reuse_when="possible") as engine:
            engine.ingest(texts, progress=False)
            answers = [engine.prefill(prompt_with(*texts)) for _ in range(5)]
            assert all(answer.stats.mode == "blend" for answer in answers)
            assert all(torch.equal(answer.logits, answers[0].logits) for answer in answers)
            logits.append(answers[0].logits.cpu())
    assert torch.allclose(*logits, atol=1e-3)
