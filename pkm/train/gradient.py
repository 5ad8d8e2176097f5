"""The gradient of a batch's mean loss, a micro-batch at a time."""

from __future__ import annotations

import torch
from torch import nn

from pkm.config.schema import Config
from pkm.device import autocast
from pkm.distributed import dist
from pkm.evaluation.evaluate import recording
from pkm.memory.usage import UsageMeter
from pkm.model.transformer import Transformer
from pkm.train.parallel import average_statistics, sync_on_last
from pkm.train.prefetch import Batch


def backward(
    config: Config,
    module: nn.Module,
    model: Transformer,
    batch: Batch,
    scale: float,
    precision: str,
    measures: bool,
) -> tuple[float, dict[int, UsageMeter]]:
    """Add the gradient of `scale` times the global batch's mean loss to `.grad`, a micro-batch at a time.

    module      what is called: the model, or the model with its gradients summed over ranks
    batch       this rank's inputs and targets, int64 (windows, context)
    measures    also count what the memories read
    Returns the global batch's mean loss, nats per token, and a meter for each layer with a memory (none without `measures`).
    """
    device = next(model.parameters()).device
    inputs, targets = batch
    size = config.optim.micro_batch or len(inputs)
    meters = {n: UsageMeter(m.slots, m.heads) for n, m in model.memories()} if measures else {}
    total = torch.zeros((), device=device)
    for first in range(0, len(inputs), size):
        ids, wanted = (part[first : first + size].to(device, non_blocking=True) for part in (inputs, targets))
        last = first + size >= len(inputs)
        with sync_on_last(module, last), autocast(device, precision), recording(model, measures):
            loss = module(ids, wanted) / config.optim.batch_tokens
            (loss * scale).backward()
        total += loss.detach()
        for layer, meter in meters.items():
            meter.update(*model.memory(layer).selection)
    for meter in meters.values():
        meter.sum_over_ranks()
    average_statistics(model)
    return float(dist.all_reduce(total)), meters


def warm_up_ddp(config: Config, module: nn.Module, model: Transformer, batch: Batch, precision: str) -> None:
    """One backward pass that leaves nothing behind.

    After its first one DDP lays out its buckets anew, and with them the order in which more than two ranks are added up:
    a resumed run must take its first step with the layout that the run before it had.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    backward(config, module, model, batch, 1.0, precision, measures=False)
    for buffer, saved in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(saved)
