"""Everything this package knows about the inside of a Hugging Face decoder.

The model's own forward is driven, never rewritten: decoder layers are called by the model itself, and a forward
pre-hook on each of them may swap the hidden states and their positions for a subset of rows. So a family needs code
of its own only where it differs from: a list of layers, one `rotary_emb`, and in the module of its attention class an
`apply_rotary_pos_emb`. Whatever is guessed wrong here, the self-test notices.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from rag_blend.chunk import LayerKV
from rag_blend.errors import UnsupportedModelError
from rag_blend.models.attention import is_replaceable, packing
from rag_blend.models.generating import keeping_cache
from rag_blend.models.weights import WeightsWatch
from rag_blend.rope import Angles, Rotary

LayerHook = Callable[[int, torch.Tensor, dict[str, Any]], torch.Tensor]
_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class ModelAdapter:
    """One loaded decoder.

    Args:
        model: A causal language model of transformers, in eval mode.

    Raises:
        UnsupportedModelError: It is not a decoder with attention and RoPE in every layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.weights = WeightsWatch(model)
        self.config = model.config
        self._refuse_what_cannot_work()
        decoder: Any = model.base_model
        self.layers: torch.nn.ModuleList = layers_of(model)
        self._layer_types = _layer_types_of(self.config)
        self._attentions = [self._attention_of(layer) for layer in self.layers]
        self.rotary = self._find_rotary(decoder)
        self.cache_argument = cache_argument_of(model)
        self._layer_cache_argument = self._find_layer_cache_argument()
        heads = self.config.num_attention_heads
        self.num_kv_heads: int = getattr(self.config, "num_key_value_heads", None) or heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        return self.model.dtype

    @property
    def slides(self) -> bool:
        """Whether some layer's attention has a window that a prompt can fill."""
        return any(self.window(layer_idx) is not None for layer_idx in range(self.num_layers))

    def layer_type(self, layer_idx: int) -> str:
        """Layers of the same type have the same mask and the same RoPE."""
        return self._layer_types[layer_idx]

    def window(self, layer_idx: int) -> int | None:
        """How many tokens a layer's attention reaches back to, a token's own included; None: to all."""
        return window_of(self.config) if self._layer_types[layer_idx] == "sliding_attention" else None

    @property
    def attention_is_additive(self) -> bool:
        """Whether masks are added to the scores instead of being boolean.

        Eager attention takes no others, and sdpa on a CPU would make a boolean one additive in each layer anew.
        """
        return self.config._attn_implementation == "eager" or self.device.type == "cpu"

    @property
    def can_watch_attention(self) -> bool:
        """Whether it can be seen what a question attends to; see `is_replaceable`."""
        return is_replaceable(self.model)

    def packing(self) -> contextlib.AbstractContextManager[None]:
        """Within it, attention of few rows does not copy the keys for every query head."""
        return packing(self.model)

    def rotates(self, layer_idx: int) -> bool:
        """Whether a layer's keys have positions; those of a layer without RoPE are the same everywhere."""
        return bool(getattr(self._attentions[layer_idx], "use_rope", True))

    def rotate_into(self, layer_idx: int, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """Write a layer's keys at their positions to `target`; see `Rotary.rotate_into`."""
        if self.rotates(layer_idx):
            self.rotary.rotate_into(target, keys, self.rotary.of_layer(layer_idx, angles))
        else:
            target.copy_(keys)

    def add_rotated(self, layer_idx: int, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """Add keys, once they are at their positions, to `target`; see `Rotary.add_rotated`."""
        if self.rotates(layer_idx):
            self.rotary.add_rotated(target, keys, self.rotary.of_layer(layer_idx, angles))
        else:
            target += keys

    def unrotate(self, layer_idx: int, keys: torch.Tensor, angles: Angles) -> torch.Tensor:
        """A layer's keys without their positions, float32; see `Rotary.unrotate`."""
        if not self.rotates(layer_idx):
            return keys.float()
        return self.rotary.unrotate(keys, self.rotary.of_layer(layer_idx, angles))

    @contextlib.contextmanager
    def sliding_over(self, num_tokens: int) -> Iterator[None]:
        """Within it windows are so short, for the model as well, which makes its masks from its configuration."""
        usual = window_of(self.config)
        if usual is None:
            yield
            return
        self.config.sliding_window = min(usual, num_tokens)
        try:
            yield
        finally:
            self.config.sliding_window = usual

    @contextlib.contextmanager
    def layer_hooks(self, hook: LayerHook, cache: Cache) -> Iterator[None]:
        """Call `hook(layer_idx, hidden_states, kwargs)` before each layer of forwards that use `cache`.

        The hook returns the hidden states the layer shall see and may replace entries of `kwargs`.
        """
        handles = [self._hook_layer(layer, i, hook, cache) for i, layer in enumerate(self.layers)]
        try:
            with keeping_cache(self.model, cache, self.cache_argument):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def fresh_kv(self, layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> LayerKV:
        """Keys (after RoPE) and values that a layer would compute, without running its attention.

        Args:
            layer_idx: The layer.
            hidden_states: Its input, shape (batch, num_tokens, hidden_size).
            kwargs: Its other arguments, as a layer hook sees them.

        Returns:
            The first batch row, (num_kv_heads, num_tokens, head_dim) each.
        """
        interceptor = _Interceptor()
        try:
            # forward, not __call__: the layer's own pre-hook must not run again.
            self.layers[layer_idx].forward(hidden_states, **{**kwargs, self._layer_cache_argument: interceptor})
        except _InterceptedError as intercepted:
            return intercepted.kv
        raise UnsupportedModelError(f"layer {layer_idx} of {describe(self.model)} does not use its cache.")

    def _hook_layer(
        self, layer: torch.nn.Module, layer_idx: int, hook: LayerHook, cache: Cache
    ) -> torch.utils.hooks.RemovableHandle:
        def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get(self._layer_cache_argument) is not cache:
                return None  # somebody else is using the model
            hidden_states = args[0] if args else kwargs.pop("hidden_states")
            kwargs = dict(kwargs)
            return (hook(layer_idx, hidden_states, kwargs), *args[1:]), kwargs

        return layer.register_forward_pre_hook(before, with_kwargs=True)

    def _attention_of(self, layer: torch.nn.Module) -> torch.nn.Module:
        for child in layer.children():
            if hasattr(_module_of(child), "apply_rotary_pos_emb") and "Attention" in type(child).__name__:
                return child
        raise UnsupportedModelError(f"{describe(self.model)} has no rotary position embedding (RoPE).")

    def _find_rotary(self, decoder: Any) -> Rotary:
        module = getattr(decoder, "rotary_emb", None)
        if module is None:
            raise UnsupportedModelError(f"{describe(self.model)} has no rotary position embedding (RoPE).")
        parameters = inspect.signature(inspect.unwrap(module.forward)).parameters
        layer_types = self._layer_types if "layer_type" in parameters else []
        if layer_types and "dynamic" in module.rope_type.values():  # their frequencies would have to be reset
            raise UnsupportedModelError(f"{describe(self.model)} has dynamic RoPE that differs between its layers.")
        return Rotary(module, _module_of(self._attentions[0]).apply_rotary_pos_emb, layer_types)

    def _find_layer_cache_argument(self) -> str:
        """Mostly the model's own name for it; some families have kept an older one in their layers."""
        parameters = inspect.signature(inspect.unwrap(self.layers[0].forward)).parameters
        return "layer_past" if "layer_past" in parameters else self.cache_argument

    def _refuse_what_cannot_work(self) -> None:
        reason = _why_not(self.model)
        if reason:
            servable = not self.config.is_encoder_decoder
            raise UnsupportedModelError(f"{describe(self.model)} cannot be blended: {reason}", servable)


def lock_of(model: PreTrainedModel) -> threading.RLock:
    """The one lock of a model: engines that share it must not run it at once, since hooks belong to the model."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


def cache_argument_of(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes the cache: transformers renamed it in 5.24."""
    parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def describe(model: PreTrainedModel) -> str:
    """The model's class and type, for messages."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers, in order; none if they are not a list."""
    decoder = model.base_model
    layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
    return layers if isinstance(layers, torch.nn.ModuleList) else torch.nn.ModuleList()


def window_of(config: Any) -> int | None:
    """The window of attention that slides; None if there is none, or one that the longest prompt does not fill."""
    window: int | None = getattr(config, "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else window


def _layer_types_of(config: Any) -> list[str]:
    """The type of each layer; where the configuration names none, they are all alike."""
    slides = getattr(config, "sliding_window", None) is not None
    named = getattr(config, "layer_types", None)
    return list(named or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers)


def _module_of(child: torch.nn.Module) -> Any:
    return sys.modules[type(child).__module__]


def what_else_than_text_to_text(config: Any) -> str | None:
    """Why a model with this configuration is no decoder of text alone; None if it is one."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder."
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        return "it takes other inputs than text."
    return None


def _why_not(model: PreTrainedModel) -> str | None:
    config = model.config
    if other := what_else_than_text_to_text(config):
        return other
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}, not full or sliding attention only."
    if config._attn_implementation not in {"sdpa", "eager"}:
        return (
            f"attention {config._attn_implementation!r} cannot express the mask of scattered tokens; "
            "load the model with attn_implementation='sdpa'."
        )
    if not len(layers_of(model)):
        return "its decoder is not a list of layers with rotary position embeddings (RoPE)."
    return None


class _InterceptedError(Exception):
    def __init__(self, kv: LayerKV) -> None:
        self.kv = kv


class _InterceptingLayer(DynamicLayer):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise _InterceptedError(LayerKV(key_states[0], value_states[0]))


class _Interceptor(Cache):
    """Stops a layer as soon as it hands over its keys and values."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_InterceptingLayer)
