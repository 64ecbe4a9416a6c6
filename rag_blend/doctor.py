"""What this package can do for a model, and why: facts, and the results of trying it out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.engine import BlendEngine, Storage
from rag_blend.errors import UnsupportedModelError
from rag_blend.info import context_window_of, rope_types_of
from rag_blend.models import ModelAdapter, adapter_for, bare_model, lock_of
from rag_blend.selftest import check_model

Mode = Literal["blend", "prefix", "full", "refused"]
WHAT_MODES_MEAN: dict[Mode, str] = {
    "blend": "stored chunks are reused wherever they stand in a prompt, earlier prompts exactly",
    "prefix": "what earlier prompts begin with is reused exactly, stored chunks are not; on_unsupported='full'",
    "full": "nothing is reused, every prompt is prefilled; on_unsupported='full'",
    "refused": "it cannot be served at all",
}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `examine` found.

    Attributes:
        model: Name or path.
        family: Its class and ``model_type``.
        parameters: How many it has.
        dtype: What it computes in.
        attention: Which implementation of attention it was loaded with.
        context_window: Tokens of prompt and answer together.
        rope: Its RoPE types; empty if it has none.
        mode: The most that can be reused; `WHAT_MODES_MEAN` explains it.
        reason: Why no more than that, or on which condition; None where chunks can be blended without one.
        self_test: ``"passed"``, or which comparison with the model's own results failed; None if it was not reached.
        layers: Its decoder layers.
        layers_without_rope: How many of them know no positions; their keys are stored as they are.
        kv_heads: Heads of keys and values that are cached; None where nothing can be stored.
        head_dim: Their size; the same.
        kv_bytes_per_token: What a stored token takes, before the codec and the header of its chunk; the same.
        sees_attention: Whether selectors that ask what the question attends to can know it.
        policy: How an engine on the given storage would treat prompts: by which selector, and who decided.
    """

    model: str
    family: str
    parameters: int
    dtype: str
    attention: str
    context_window: int
    rope: tuple[str, ...]
    mode: Mode
    reason: str | None
    self_test: str | None
    layers: int
    layers_without_rope: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_bytes_per_token: int | None = None
    sees_attention: bool = False
    policy: str | None = None

    @property
    def gib_per_million_tokens(self) -> float | None:
        """Disk for a million stored tokens, GiB; None where nothing can be stored."""
        return None if self.kv_bytes_per_token is None else self.kv_bytes_per_token * 1e6 / 2**30


def examine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, storage: Storage = None, **options: Any
) -> ModelReport:
    """Try a model out.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        storage: A store to look for a calibration's verdict in; None: none.
        options: Arguments of `BlendEngine` that a verdict belongs to (``namespace``, ``prime``, ...), or ``kv_dtype``.

    Raises:
        OSError: The storage cannot be opened.
    """
    model = bare_model(model)
    adapter, reason, self_test = _try(model)
    mode, policy = _serve(model, tokenizer, storage, options)
    config = model.config.get_text_config(decoder=True)
    report = ModelReport(
        model=str(model.config.name_or_path or type(model).__name__),
        family=f"{type(model).__name__} ({model.config.model_type})",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config._attn_implementation),
        context_window=context_window_of(model.config, tokenizer),
        rope=rope_types_of(model.config),
        mode=mode,
        reason=reason,
        self_test=self_test,
        layers=int(config.num_hidden_layers),
        policy=policy,
    )
    return report if adapter is None else _with_sizes(report, adapter, options.get("kv_dtype"))


def _try(model: PreTrainedModel) -> tuple[ModelAdapter | None, str | None, str | None]:
    """The adapter if chunks can be blended, why not or on which condition, and how the self-test went."""
    try:
        with lock_of(model):
            adapter = adapter_for(model, windows=True)
    except UnsupportedModelError as error:
        return None, error.reason, None
    try:
        with lock_of(model):
            check_model(adapter)
    except UnsupportedModelError as error:
        return None, error.reason, error.reason
    if not adapter.slides:
        return adapter, None, "passed"
    condition = "with on_unsupported='calibrated' it is blended where `rag-blend calibrate` has passed."
    return adapter, f"its attention slides over {model.config.sliding_window} tokens; {condition}", "passed"


def _serve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, storage: Storage, options: dict[str, Any]
) -> tuple[Mode, str | None]:
    try:
        with BlendEngine(model, tokenizer, storage, on_unsupported="calibrated", **options) as engine:
            return engine.mode, str(engine.policy)
    except UnsupportedModelError:
        return "refused", None


def _with_sizes(report: ModelReport, adapter: ModelAdapter, kv_dtype: torch.dtype | None) -> ModelReport:
    size = 2 if kv_dtype is None else kv_dtype.itemsize
    return replace(
        report,
        layers_without_rope=sum(not adapter.rotates(layer_idx) for layer_idx in range(adapter.num_layers)),
        kv_heads=adapter.num_kv_heads,
        head_dim=adapter.head_dim,
        kv_bytes_per_token=2 * adapter.num_layers * adapter.num_kv_heads * adapter.head_dim * size,
        sees_attention=adapter.can_watch_attention,
    )
