"""Where numbers come from: they mean nothing without it."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import rag_blend


def environment_of(model: PreTrainedModel) -> dict[str, str]:
    """The model, the machine and the versions, as names and values to print."""
    name = str(model.config.name_or_path or type(model).__name__)
    return {
        "model": os.path.basename(os.path.normpath(name)),
        "dtype": str(model.dtype).removeprefix("torch."),
        **machine(model.device),
    }


def machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions, for what is measured without a model."""
    return {
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "rag_blend": rag_blend.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
