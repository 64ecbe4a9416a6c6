"""`generate` must not throw away the cache that it is given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import Cache


@contextlib.contextmanager
def keeping_cache(model: Any, cache: Cache, cache_argument: str) -> Iterator[None]:
    """Let `model.generate` begin with this cache although it is still empty.

    Phi-3 and kin drop what they are given when a prompt is longer than the original window of their long RoPE, since
    its rows may have the angles of a shorter one. An empty cache has no rows.

    Args:
        model: The model.
        cache: The cache.
        cache_argument: See `cache_argument_of`.
    """
    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        yield
        return
    usual, own = model.prepare_inputs_for_generation, vars(model).get("prepare_inputs_for_generation")

    @functools.wraps(usual)  # `generate` looks at its arguments
    def prepare(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(cache_argument) is cache and not cache.get_seq_length():
            return GenerationMixin.prepare_inputs_for_generation(model, input_ids, *args, **kwargs)
        return usual(input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
        if own is not None:  # we are inside another of these
            model.prepare_inputs_for_generation = own
