"""Where a run computes and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from pkm.config import Config
from pkm.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(config: Config) -> torch.device:
    """`config.device`, or for `auto` the first of cuda, mps, cpu that is there; UserError if the named one is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name in there if there[name]) if config.device == "auto" else config.device
    if not there[kind]:
        available = ", ".join(name for name in there if there[name])
        raise UserError(f"this machine has no {kind} device", "device", f"choose auto or one of: {available}")
    return torch.device(kind)


def pick_precision(config: Config, device: torch.device) -> torch.dtype:
    """dtype of matrix products: `config.precision`, or for `auto` bf16 on a GPU that has it, else fp32."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    dtype = DTYPES[config.precision]
    if dtype is torch.float16 and device.type == "cpu":
        raise UserError("fp16 needs a GPU: its loss scaling is made for one", "precision", "choose bf16, fp32 or auto")
    return dtype


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Matrix products in `dtype`; everything that torch keeps in fp32 stays there."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)
