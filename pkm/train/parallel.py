"""How a model is run on several ranks, and its blocks: compiled, or with their activations recomputed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pkm.config.schema import Config
from pkm.distributed import dist
from pkm.distributed.collectives import sum_over_ranks
from pkm.memory import sharding
from pkm.memory.query import BatchNorm
from pkm.model.transformer import Transformer


def apply_parallelism(model: Transformer, config: Config) -> Transformer:
    """Set up compilation, activation checkpointing and parallelism in a new model, before it is moved to its device.

    Blocks compiled or their activations recomputed in backward; with several ranks, BatchNorm over all of them and the
    values' columns shared out.
    """
    model.activation_checkpointing = config.parallel.activation_checkpointing
    if dist.world_size() > 1:
        for norm in batch_norms(model):
            norm.sum_over_ranks = sum_over_ranks if config.parallel.sync_batch_norm else None
        for _, experts in model.experts():
            experts.sum_over_ranks = sum_over_ranks
        for table in model.tables().values() if config.parallel.values == "sharded" else ():
            sharding.shard(table)
    if config.compile:
        for block in model.blocks:
            block.compile()  # block by block: blocks of one kind share their compiled code, which saves most of the time
    return model


def distribute(model: Transformer) -> nn.Module:
    """The module to call in training: with several ranks, gradients of the dense part are summed over them in backward.

    DDP skips the values: their gradients are sparse or sharded (pkm.memory.sharding).
    """
    if dist.world_size() == 1:
        return model
    values = [f"{name}.weight" for name in model.tables()]
    # Running statistics are each rank's own. torch 2.13 renamed the setting that says so; this way all versions know it.
    buffers = [name for name, _ in model.named_buffers()]
    DDP._set_params_and_buffers_to_ignore_for_model(model, values + buffers)
    # Every rank has built or loaded the same weights; nothing needs to be sent before the first step.
    wrapped = DDP(model, gradient_as_bucket_view=True, init_sync=False)
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def sync_on_last(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Within it, gradients are summed over ranks only if this is the `last` micro-batch of a step."""
    return nullcontext() if last or not isinstance(module, DDP) else module.no_sync()


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def average_statistics(model: Transformer) -> None:
    """With `sync_batch_norm: false` the running statistics become the ranks' mean, so that all score and save the same model."""
    own = [buffer for norm in batch_norms(model) if norm.sum_over_ranks is None for buffer in norm.buffers()]
    if dist.world_size() == 1 or not own:
        return
    means = dist.all_reduce(torch.cat(own)) / dist.world_size()
    for buffer, mean in zip(own, means.split([len(buffer) for buffer in own]), strict=True):
        buffer.copy_(mean)


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Add up gradients; DDP's own default would average them, which the loss already does."""
    work = td.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
