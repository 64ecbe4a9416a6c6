from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import random_model
from contracts.kv import token_ids

from rag_blend.chunk import Context, LayerKV
from rag_blend.models import adapter_for
from rag_blend.prefiller import ChunkPrefiller, Job, PrefillBehind, Prefilled, PrefillModel
from rag_blend.transformers_prefill import TransformersPrefill

CHUNKS = [token_ids(seed, length) for seed, length in ((1, 20), (2, 17), (3, 20))]
PRECEDING = [token_ids(seed, 9) for seed in (20, 21, 22)]
FIRST, SECOND, NOTHING = token_ids(10, 12), token_ids(11, 30), np.empty(0, dtype=np.int32)


def prefill(*contexts: tuple[np.ndarray, float], chunks: list[np.ndarray] = CHUNKS) -> list[Prefilled]:
    shared = tuple(Context(*context) for context in contexts)
    return prefill_each([Job(chunk, shared) for chunk in chunks])


def prefill_each(jobs: list[Job], model: PrefillModel | None = None) -> list[Prefilled]:
    model = model or TransformersPrefill(adapter_for(random_model()))
    return ChunkPrefiller(model, jobs).prefill(jobs)


def assert_same(left: list[LayerKV], right: list[LayerKV]) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.values, other.values, atol=1e-5, rtol=1e-5)


def test_several_contexts_give_the_weighted_mean() -> None:
    alone = [prefill((context, 1.0)) for context in (FIRST, SECOND, NOTHING)]
    together = prefill((FIRST, 0.5), (SECOND, 0.3), (NOTHING, 0.2))
    for first, second, nothing, mean in zip(*alone, together, strict=True):
        expected = [
            LayerKV(*(0.5 * x + 0.3 * y + 0.2 * z for x, y, z in zip(a, b, c, strict=True)))
            for a, b, c in zip(first.layers, second.layers, nothing.layers, strict=True)
        ]
        assert_same(mean.layers, expected)


def test_a_batch_gives_what_single_chunks_give() -> None:
    contexts = ((FIRST, 0.7), (NOTHING, 0.3))
    for chunk, in_batch in zip(CHUNKS, prefill(*contexts), strict=True):
        (by_itself,) = prefill(*contexts, chunks=[chunk])
        assert_same(in_batch.layers, by_itself.layers)
        assert in_batch.staleness is not None and by_itself.staleness is not None
        assert len(in_batch.staleness) == len(chunk)
        np.testing.assert_allclose(in_batch.staleness, by_itself.staleness, rtol=0.01, atol=1e-5)


def test_staleness_is_the_relative_variance_over_contexts() -> None:
    (one,) = prefill((FIRST, 1.0), chunks=CHUNKS[:1])
    (other,) = prefill((SECOND, 1.0), chunks=CHUNKS[:1])
    (both,) = prefill((FIRST, 0.6), (SECOND, 0.4), chunks=CHUNKS[:1])
    parts = []
    for a, b in zip(one.layers, other.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            mean = 0.6 * x + 0.4 * y
            variance = 0.6 * (x - mean).pow(2) + 0.4 * (y - mean).pow(2)
            parts.append(variance.mean(dim=(0, 2)) / mean.pow(2).mean())
    expected = torch.stack(parts).mean(0).numpy()
    assert both.staleness is not None and both.staleness.dtype == np.float16
    np.testing.assert_allclose(both.staleness, expected, rtol=0.01, atol=1e-5)
    assert expected.max() > 0.01


def test_equal_contexts_make_nothing_stale() -> None:
    (both,) = prefill((FIRST, 0.5), (FIRST, 0.5), chunks=CHUNKS[:1])
    assert both.staleness is not None and both.staleness.max() < 1e-3


def test_one_context_tells_nothing_of_staleness() -> None:
    assert [chunk.staleness for chunk in prefill((FIRST, 1.0))] == [None] * len(CHUNKS)


@pytest.mark.parametrize("context", [FIRST, NOTHING], ids=["some", "none"])
def test_values_of_one_context_are_those_of_the_model(context: np.ndarray) -> None:
    model = random_model()
    ids = torch.from_numpy(np.concatenate([context, CHUNKS[0]])).long()[None]
    cache = model.base_model(input_ids=ids, use_cache=True).past_key_values
    (chunk,) = prefill_each([Job(CHUNKS[0], (Context(context, 1.0),))], TransformersPrefill(adapter_for(model)))
    for idx, layer in enumerate(chunk.layers):
        torch.testing.assert_close(layer.values, cache.layers[idx].values[0, :, len(context) :], atol=1e-5, rtol=1e-5)


class Counting:
    """A model that notes what it is asked for: how many chunks at once behind which context."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.batches: list[tuple[bytes, int]] = []
        self._model = TransformersPrefill(adapter_for(random_model()))

    def behind(self, context: np.ndarray) -> PrefillBehind:
        self.begun.append(context.tobytes())
        behind = self._model.behind(context)

        def counted(chunks: Sequence[np.ndarray]) -> list[list[LayerKV]]:
            self.batches.append((context.tobytes(), len(chunks)))
            return behind(chunks)

        return counted


def test_chunks_of_one_batch_may_have_contexts_of_their_own() -> None:
    jobs = [
        Job(CHUNKS[0], (Context(FIRST, 0.7), Context(NOTHING, 0.3))),
        Job(CHUNKS[1], (Context(SECOND, 0.6), Context(NOTHING, 0.4))),
        Job(CHUNKS[2], (Context(FIRST, 1.0),)),
    ]
    model = Counting()
    together = prefill_each(jobs, model)
    assert model.batches == [(FIRST.tobytes(), 2), (NOTHING.tobytes(), 2), (SECOND.tobytes(), 1)]
    for job, prefilled in zip(jobs, together, strict=True):
        (alone,) = prefill_each([job])
        assert_same(prefilled.layers, alone.layers)
        assert (prefilled.staleness is None) == (alone.staleness is None)


def test_a_context_that_is_shared_is_begun_once() -> None:
    model = Counting()
    jobs = [
        Job(chunk, (Context(own, 0.5), Context(NOTHING, 0.5))) for chunk, own in zip(CHUNKS, PRECEDING, strict=True)
    ]
    prefiller = ChunkPrefiller(model, jobs)
    for job in jobs:
        prefiller.prefill([job])
    assert sorted(model.begun) == sorted([NOTHING.tobytes(), *(own.tobytes() for own in PRECEDING)])


def test_few_shared_contexts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_blend.prefiller._MOST_KEPT", 1)
    model = Counting()
    third = PRECEDING[0]
    jobs = [Job(CHUNKS[0], (Context(context, 1.0),)) for context in (FIRST, SECOND, third, FIRST, third, SECOND)]
    prefiller = ChunkPrefiller(model, jobs)
    for job in jobs:
        prefiller.prefill([job])
    assert model.begun == [context.tobytes() for context in (FIRST, SECOND, third, FIRST, SECOND)]
