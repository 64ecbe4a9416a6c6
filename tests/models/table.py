"""Write docs/models.md: run every family, measure, and print the tables.

python tests/models/table.py > docs/models.md
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import ALL_FAMILIES, FAMILY_ROPES, SINCE, random_model, random_text, small_tokenizer
from exactness import HEAD, QUESTION, full_cache, full_logits, prompt_of
from models.test_prefix_only import NOTHING, ROWS, STATES
from models.test_windows import WINDOW, WINDOWED
from transformers import PreTrainedModel

from rag_blend import BlendEngine, UnsupportedModelError
from rag_blend.models import ModelAdapter, adapter_for

TEXTS = [random_text(seed) for seed in range(5)]
EXPERTS = {"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}

HEADER = """# Supported models

Made by `python tests/models/table.py > docs/models.md`: every line is the result of a run with small random models
in float32 on a CPU, under transformers {version} and torch {torch}. `tests/models` repeats the same checks as tests.
For a model of yours, `rag-blend doctor MODEL` tells mode, reason, self-test, and what its caches take.

## Blended

Largest difference from the model's own result, relative to its largest number, the worst of all RoPE types in the line;
the tests allow 1e-04. *r = 1*: everything recomputed, logits. *First chunk*: behind its own head, nothing recomputed,
logits. *Shift*: keys and values of the first layer, of chunks that stand elsewhere than where they were cached.

| family | r = 1 | first chunk | shift | RoPE types | what is special |
|---|---|---|---|---|---|
"""
BETWEEN = """
Prompts are longer than the original window of the RoPE types that have one (64 tokens here), and in the tests on both
sides of it. Whether blending is *good enough* is not a matter of the family: `rag-blend calibrate` measures it for a
model on your texts and leaves its verdict in the store. Without one the engine warns once and uses its default; a model
that failed is served by full prefill.

Attention: sdpa and eager. Weights: float32, bfloat16, float16, and quantised ones as far as a token's result does not
depend on the other tokens, which the self-test finds out. Tried on a CPU: torchao's int8 weights are as exact as the
table; bitsandbytes' 4-bit ones too where everything is recomputed, else within 5e-03, since its kernels round according
to the number of rows; its 8-bit ones quantise activations together and are refused by name in float32.

PEFT adapters belong to the key. A switch is noticed: nothing that was cached with another adapter is used.

## Blended after a calibration

Attention that slides over a window is blended as exactly: each layer has its own mask and RoPE, and the self-test
shortens the window so that it sees it slide. But with windows a token depends on what is far away through other tokens
only, and no measurement of ours says yet how well that is repaired. So `on_unsupported="calibrated"` blends such models
where `rag-blend calibrate` has passed in the same store, with the same namespace and priming. Until then, and after a
failure, they are served as below; under `"error"`, the default, they are refused. A window that the model's longest
prompt does not fill is none.

The same differences, with windows of {window} tokens and prompts of more than ten times as many:

| family | r = 1 | first chunk | shift | layers with a window | what is special |
|---|---|---|---|---|---|
"""
SERVED = """
## Served, not blended

With `on_unsupported="full"`; otherwise refused by name. *Any*: a prompt goes on from however much it has in common with
the beginning of an earlier one. *Whole*: it goes on from an earlier prompt with its answer, as in a chat. *Nothing*:
every prompt is prefilled. What is reused is exact: windows, absolute positions and states depend on what stands in
front only.

| family | reuse | difference | why it is not blended |
|---|---|---|---|
"""
FOOTER = """
Encoder-decoders (T5, BART, Whisper) and types of which transformers has no causal language model are refused by name,
whatever is asked, before their weights are read. Models that take images or sound besides are refused by name under
`"error"`; under `"full"` they answer prompts of text.

## Versions of transformers

4.57 to 5.24. `tests/versions.sh 4.57.6 5.0.0 5.12.1` installs each of them somewhere temporary, with the
huggingface_hub that it wants, and runs the tests of this page under it. Families that a version lacks or drives in
another way are refused by name there; the tests leave them out:
{since}.
Before 5.0, RoPE types of OLMo 2 other than the default are not tried, and `anchor` and `probe` cannot see the attention
of Qwen2-MoE.
"""


class Line(NamedTuple):
    ratio_one: float
    first_chunk: float
    shift: float


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def measured(model: PreTrainedModel) -> Line:
    options = {
        "prime": "none", "kv_dtype": torch.float32, "recompute_ratio": 0.0, "prefix_cache_bytes": 0,
        "on_unsupported": "measured",
    }  # fmt: skip
    with BlendEngine(model, small_tokenizer(), None, **options) as engine:
        engine.ingest(TEXTS, head=HEAD, progress=False)
        ids = prompt_of(engine, HEAD, TEXTS[1:4], QUESTION)
        ratio_one = difference(engine.prefill(ids, recompute_ratio=1.0).logits, full_logits(model, ids))
        moved, expected = engine.prefill(ids).cache.layers[0], full_cache(model, ids).layers[0]
        shift = max(difference(moved.keys, expected.keys), difference(moved.values, expected.values))
        first = prompt_of(engine, HEAD, TEXTS[:1], QUESTION)
        prefill = engine.prefill(first)
        assert prefill.stats.mode == "prefix" and prefill.stats.prefix_tokens > 60
        return Line(ratio_one, difference(prefill.logits, full_logits(model, first)), shift)


def specialities(family: str, adapter: ModelAdapter) -> Iterator[str]:
    rotary_dim = adapter.rotary.angles(1, adapter.device).cos.shape[-1]
    if rotary_dim < adapter.head_dim:
        yield f"{rotary_dim / adapter.head_dim:.0%} of each head is rotated"
    if not adapter.rotary.rotates_halves:
        yield "neighbours are rotated"
    if not all(adapter.rotates(layer_idx) for layer_idx in range(adapter.num_layers)):
        yield "layers without RoPE"
    if adapter.num_kv_heads == 1:
        yield "one head of keys"
    if adapter.num_kv_heads == adapter.config.num_attention_heads:
        yield "a head of keys per query head"
    if adapter.rotary.num_types > 1:
        yield "a RoPE for each type of layer"
    if family in EXPERTS:
        yield "mixture of experts"
    if not adapter.can_watch_attention:
        yield "`anchor` and `probe` cannot see its attention"


def blended() -> Iterator[str]:
    for family in ALL_FAMILIES:
        ropes = [rope for name, rope in FAMILY_ROPES if name == family]
        worst = [max(errors) for errors in zip(*(measured(random_model(family, rope)) for rope in ropes), strict=True)]
        own = [random_model(family, rope).config.rope_parameters["rope_type"] for rope in ropes]
        special = ", ".join(specialities(family, adapter_for(random_model(family))))
        yield f"| {family} | {' | '.join(f'{error:.0e}' for error in worst)} | {', '.join(own)} | {special} |"


def windowed() -> Iterator[str]:
    for family, changes in WINDOWED.items():
        model = random_model(family, **changes)
        adapter = adapter_for(model, windows=True)
        count = sum(adapter.window(layer_idx) is not None for layer_idx in range(adapter.num_layers))
        special = ", ".join(specialities(family, adapter))
        errors = " | ".join(f"{error:.0e}" for error in measured(model))
        yield f"| {family} | {errors} | {count} of {adapter.num_layers} | {special} |"


def served(reuse: str, family: str, changes: dict[str, object]) -> str:
    model = random_model(family, **changes)
    try:
        adapter_for(model)
        why = "the self-test finds it different"
    except UnsupportedModelError as error:
        why = re.sub(r"^.*?'\) (?:(?:cannot be|is not) blended: )?", "", error.reason)
    with BlendEngine(model, small_tokenizer(), None, prime="none", on_unsupported="full") as engine:
        first = torch.randint(5, 500, (70,), generator=torch.Generator().manual_seed(1)).tolist()
        engine.prefill(first)
        ids = [*first, *first[:20]]
        prefill = engine.prefill(ids)
        assert prefill.stats.prefix_tokens == (0 if reuse == "nothing" else 70)
        return f"| {family} | {reuse} | {difference(prefill.logits, full_logits(model, ids)):.0e} | {why} |"


def main() -> None:
    logging.disable(logging.WARNING)
    print(HEADER.format(version=transformers.__version__, torch=torch.__version__.partition("+")[0]), end="")
    for line in blended():
        print(line, flush=True)
    print(BETWEEN.format(window=WINDOW), end="")
    for line in windowed():
        print(line, flush=True)
    print(SERVED, end="")
    for reuse, kinds in (("any", ROWS), ("whole", STATES), ("nothing", NOTHING)):
        for family, changes in kinds.items():
            print(served(reuse, family, changes), flush=True)
    print(FOOTER.format(since=", ".join(f"{family} before {version}" for family, version in SINCE.items())), end="")


if __name__ == "__main__":
    main()
