"""A model and its tokenizer, loaded the way this package wants them."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load(
    path_or_hub_id: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; see `BlendEngine.from_pretrained` for the arguments.

    Raises:
        OSError: There is no such model.
    """
    if _looks_local(path_or_hub_id) and not os.path.isdir(path_or_hub_id):
        raise FileNotFoundError(f"there is no model directory {os.fspath(path_or_hub_id)!r}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = dict(model_kwargs or {})
    dtype = dtype or given.pop("torch_dtype", None) or (torch.float32 if device.type == "cpu" else "auto")
    # Without `trust_remote_code` transformers would ask, on a terminal that may not be there.
    loading = {"attn_implementation": "sdpa", "dtype": dtype, "trust_remote_code": False, **given}
    shared = {k: v for k, v in loading.items() if k in {"revision", "trust_remote_code", "local_files_only"}}
    tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id, **shared)
    model = AutoModelForCausalLM.from_pretrained(path_or_hub_id, **loading)
    if "device_map" not in given and not getattr(model, "is_quantized", False):  # those are where they belong
        model.to(device)  # type: ignore[arg-type]  # transformers' annotation lost the argument
    return model, tokenizer


def _looks_local(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """A hub id is `name` or `owner/name`; anything else must be a path."""
    text = os.fspath(path_or_hub_id)
    return not isinstance(path_or_hub_id, str) or text.startswith((os.sep, ".", "~")) or text.count("/") > 1
