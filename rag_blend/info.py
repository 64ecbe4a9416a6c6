"""What can be said about a model from its small files alone, without loading weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # spelled otherwise before transformers 5


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its configuration and tokenizer describe it.

    Attributes:
        name: Name or path.
        context_window: Tokens of prompt and answer together.
        has_chat_template: Whether its tokenizer has one.
    """

    name: str
    context_window: int
    has_chat_template: bool


@lru_cache(maxsize=32)
def read_model_info(path_or_hub_id: str | os.PathLike[str]) -> ModelInfo:
    """Read a model's configuration and tokenizer.

    Raises:
        OSError: There is no such model.
    """
    config = AutoConfig.from_pretrained(path_or_hub_id)
    tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id)
    return ModelInfo(str(path_or_hub_id), context_window_of(config, tokenizer), bool(tokenizer.chat_template))


def context_window_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Longest sequence in tokens: the smaller of what model and tokenizer state."""
    text_config: Any = config.get_text_config(decoder=True)
    stated = getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(stated, tokenizer.model_max_length))


def rope_types_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The types of rotary position embedding that a model has, also those of single kinds of layers; sorted."""
    decoder: Any = config.get_text_config(decoder=True)
    # The second is the name before transformers 5.
    parameters = getattr(decoder, "rope_parameters", None) or getattr(decoder, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return tuple(sorted({kind["rope_type"] for kind in kinds if "rope_type" in kind}))
