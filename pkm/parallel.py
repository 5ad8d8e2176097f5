"""Where a run computes, in which precision, and how its blocks are run: compiled, or with their activations recomputed."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pkm import dist
from pkm.collectives import sum_over_ranks
from pkm.config import Config
from pkm.errors import UserError
from pkm.memory import ranks
from pkm.memory.kernels.choose import describe
from pkm.memory.query import BatchNorm
from pkm.model import Transformer

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
        raise UserError(
            f"this machine shows {gpus} GPUs, and none for local rank {number}", "device", "start a rank a GPU"
        )
    return torch.device(kind, number)


def pick_precision(config: Config, device: torch.device) -> str:
    """fp32, tf32, bf16 or fp16: `config.precision`, or for `auto` bf16 on a GPU that has it, else fp32.

    UserError for fp16 on a CPU or tf32 without CUDA.
    """
    if config.precision == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if config.precision == "fp16" and device.type == "cpu":
        raise UserError("fp16 needs a GPU: its loss scaling is made for one", "precision", "choose bf16, fp32 or auto")
    if config.precision == "tf32" and device.type != "cuda":
        raise UserError("tf32 is a mode of NVIDIA's GPUs", "precision", "choose fp32, bf16 or auto")
    return config.precision


def kernels_line(config: Config) -> str:
    """Who would compute the memories on this machine, for a dry run."""
    if config.memory is None:
        return "no memory, no kernels"
    try:
        return f"kernels on this machine: {describe(config.memory.kernels, pick_device(config))}"
    except UserError as missing:  # a login node may well lack the GPU that the run will have
        return f"kernels: {config.memory.kernels}; on this machine not to be told: {missing.what}"


def set_up(config: Config, device: torch.device) -> None:
    """Settings of torch that hold for the whole process: the GPU, threads, and the precision of fp32 products."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton's kernels, streams and copies take the current one
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if pick_precision(config, device) == "tf32" else "highest")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Matrix products in bf16 or fp16; everything that torch keeps in fp32 stays there."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)


def prepare(model: Transformer, config: Config) -> Transformer:
    """Make a model that was just built run as the config asks, before it goes to its device.

    Blocks compiled or their activations recomputed in backward; with several ranks, BatchNorm over all of them and the
    values' columns shared out.
    """
    model.recompute = config.parallel.activation_checkpointing
    if dist.world_size() > 1:
        for _, memory in model.memories():
            if config.parallel.batch_norm == "all ranks" and isinstance(memory.query.norm, BatchNorm):
                memory.query.norm.sum_over_ranks = sum_over_ranks
            if config.parallel.values == "sharded":
                ranks.shard(memory.values)
                memory.sharded = True
    if config.compile:
        for block in model.blocks:
            block.compile()  # one block at a time: they share the compiled code, so it is done in the time of a few
    return model


def distribute(model: Transformer) -> nn.Module:
    """The module to call in training: with several ranks, gradients of the dense part are summed over them in backward.

    The values' gradients are left alone: they are compact, or each rank's own (pkm.memory.ranks).
    """
    if dist.world_size() == 1:
        return model
    values = [f"blocks.{layer - 1}.memory.values.weight" for layer, _ in model.memories()]
    # Running statistics are each rank's own. torch 2.13 renamed the setting that says so; this way all versions know it.
    buffers = [name for name, _ in model.named_buffers()]
    DDP._set_params_and_buffers_to_ignore_for_model(model, values + buffers)
    # Every rank has built or loaded the same weights; nothing needs to be sent before the first step.
    wrapped = DDP(model, gradient_as_bucket_view=True, init_sync=False)
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def last_only(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Within it, gradients are summed over ranks only if this is the `last` micro-batch of a step."""
    return nullcontext() if last or not isinstance(module, DDP) else module.no_sync()


def average_statistics(model: Transformer) -> None:
    """With `batch_norm: each rank` the running statistics become the ranks' mean, so that all score and save the same model."""
    norms = [memory.query.norm for _, memory in model.memories() if isinstance(memory.query.norm, BatchNorm)]
    own = [buffer for norm in norms if norm.sum_over_ranks is None for buffer in norm.buffers()]
    if dist.world_size() == 1 or not own:
        return
    means = dist.all_reduce(torch.cat(own)) / dist.world_size()
    for buffer, mean in zip(own, means.split([len(buffer) for buffer in own]), strict=True):
        buffer.copy_(mean)


def parameters(model: Transformer) -> tuple[int, int]:
    """How many: dense ones, and those of the values on all ranks together."""
    dense = sum(p.numel() for name, p in model.named_parameters() if ".memory.values." not in name)
    values = (m.values.weight.numel() * (dist.world_size() if m.sharded else 1) for _, m in model.memories())
    return dense, sum(values)


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Add up gradients; DDP's own default would average them, which the loss already does."""
    work = td.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak of this card in FLOP/s, for MFU; None for a CPU or a card that the table lacks."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(precision) for card, peaks in PEAKS.items() if card in name), None)
