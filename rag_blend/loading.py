"""A model and its tokenizer, loaded the way this package wants them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rag_blend.errors import UnsupportedModelError
from rag_blend.models import what_else_than_text_to_text


def load(
    path_or_hub_id: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; see `BlendEngine.from_pretrained` for the arguments.

    Raises:
        OSError: There is no such model.
        UnsupportedModelError: It does not go on with a text; said before its weights are read.
    """
    if _looks_local(path_or_hub_id) and not os.path.isdir(path_or_hub_id):
        raise FileNotFoundError(f"there is no model directory {os.fspath(path_or_hub_id)!r}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = dict(model_kwargs or {})
    dtype = dtype or given.pop("torch_dtype", None)
    # Without `trust_remote_code` transformers would ask, on a terminal that may not be there.
    loading = {"trust_remote_code": False, **given}
    shared = {k: v for k, v in loading.items() if k in {"revision", "trust_remote_code", "local_files_only"}}
    config = given.get("config")
    if config is None and not _is_adapter(path_or_hub_id):  # what an adapter belongs to, transformers finds out
        config = AutoConfig.from_pretrained(path_or_hub_id, **shared)
        _refuse_other_tasks(config)
    loading.setdefault("dtype", dtype or _fastest_dtype(device, config))
    tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id, **shared)
    model = AutoModelForCausalLM.from_pretrained(path_or_hub_id, **loading)
    if "device_map" not in given and not getattr(model, "is_quantized", False):  # those are where they belong
        model.to(device)  # type: ignore[arg-type]  # transformers' annotation lost the argument
    return model, tokenizer


def _fastest_dtype(device: torch.device, config: Any) -> torch.dtype | str:
    """The checkpoint's own, but float32 on a CPU that would compute that many times more slowly.

    What the CPU says of itself decides, not a measurement: a store is only of use to engines with the same dtype.
    """
    if device.type != "cpu":
        return "auto"
    wanted = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)  # its name before transformers 5
    return torch.bfloat16 if wanted == torch.bfloat16 and _multiplies_bfloat16() else torch.float32


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has matrix instructions for bfloat16 (AMX); older versions of torch do not say."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def _refuse_other_tasks(config: Any) -> None:
    """Transformers would answer with a list of all classes it has."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if config.is_encoder_decoder or not known:
        name = (config.architectures or [type(config).__name__])[0]
        why = what_else_than_text_to_text(config) or "transformers has no causal language model of this type."
        raise UnsupportedModelError(f"{name} (model_type {config.model_type!r}) cannot be used: {why}", servable=False)


def _is_adapter(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Whether this is a directory of a PEFT adapter alone, which names its base model."""
    directory = Path(path_or_hub_id)
    return (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file()


def _looks_local(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """A hub id is `name` or `owner/name`; anything else must be a path."""
    text = os.fspath(path_or_hub_id)
    return not isinstance(path_or_hub_id, str) or text.startswith((os.sep, ".", "~")) or text.count("/") > 1
