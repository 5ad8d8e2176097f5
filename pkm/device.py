"""Which device a run computes on and in which precision, and torch's settings for both."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch

from pkm.config.schema import Config, OptimConfig
from pkm.errors import UserError
from pkm.machine import cpu_has_bf16, keep_freed_memory

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Dense peak of matrix products, FLOP/s, by a part of the card's name and dtype (vendors' data sheets).
PEAKS = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "tf32": 418e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "RTX 4090": {"bf16": 165e12, "fp16": 165e12, "tf32": 82.6e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
}


@dataclass(frozen=True)
class Compute:
    """Where a run computes and in which precision, with nothing left `auto`: decided once, after loading."""

    device: torch.device
    precision: str
    """fp32, tf32, bf16 or fp16."""

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in bf16 or fp16; everything that torch keeps in fp32 stays there."""
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    def peak_flops(self) -> float | None:
        """Dense peak of this card in FLOP/s, for MFU; None for a CPU or a card that the table lacks."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peaks.get(self.precision) for card, peaks in PEAKS.items() if card in name), None)

    @property
    def hardware(self) -> str:
        """In words: the card, or the CPU's threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type}, {torch.get_num_threads()} threads"

    def wait(self) -> None:
        """Until everything that was given to the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def decide(config: Config) -> Compute:
    """The device and precision that `config` asks for, or for `auto` the best there is; UserError if they are not there."""
    device = pick_device(config)
    return Compute(device, pick_precision(config, device))


def pick_device(config: Config) -> torch.device:
    """`config.device`, or for `auto` the first of cuda, mps, cpu that is there; UserError if the named one is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name in there if there[name]) if config.device == "auto" else config.device
    if not there[kind]:
        available = ", ".join(name for name in there if there[name])
        raise UserError(f"this machine has no {kind} device", "device", f"choose auto or one of: {available}")
    if kind != "cuda":
        return torch.device(kind)
    number, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= gpus:
        what = f"this machine shows {gpus} GPUs, and none for local rank {number}"
        raise UserError(what, "device", "start a rank a GPU")
    return torch.device(kind, number)


def pick_precision(config: Config, device: torch.device) -> str:
    """fp32, tf32, bf16 or fp16: `config.precision`, or for `auto` bf16 on a GPU or CPU that has it, else fp32.

    UserError for fp16 on a CPU or tf32 without CUDA.
    """
    if config.precision == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return "bf16" if on_gpu or (device.type == "cpu" and cpu_has_bf16()) else "fp32"
    if config.precision == "fp16" and device.type == "cpu":
        raise UserError("fp16 needs a GPU: its loss scaling is made for one", "precision", "choose bf16, fp32 or auto")
    if config.precision == "tf32" and device.type != "cuda":
        raise UserError("tf32 is a mode of NVIDIA's GPUs", "precision", "choose fp32, bf16 or auto")
    return config.precision


def settled(config: Config) -> Config:
    """For plans: `config` with what would be chosen on this machine for `auto`, or as it is where its device is not here."""
    with suppress(UserError):
        compute = decide(config)
        update = {"precision": compute.precision, "optim": settled_optim(config, compute)}
        return config.model_copy(update=update)
    return config


def settled_optim(config: Config, compute: Compute) -> OptimConfig:
    """`config.optim` with what `values.dtype: auto` is there."""
    optim, values = config.optim, config.optim.values
    if values.dtype != "auto":
        return optim
    halves = compute.device.type == "cuda" and compute.precision in ("bf16", "fp16") and values.update != "dense"
    kept = values.model_copy(update={"dtype": "bf16+master" if halves else "fp32"})
    return optim.model_copy(update={"values": kept})


def configure_torch(config: Config, compute: Compute) -> None:
    """Settings that hold for the whole process: the GPU, threads, memory on a CPU, and the precision of fp32 products."""
    if compute.device.type == "cuda":
        torch.cuda.set_device(compute.device)  # Triton's kernels, streams and copies take the current one
    else:
        keep_freed_memory()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if compute.precision == "tf32" else "highest")
