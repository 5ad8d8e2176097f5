"""One step: the gradient of a batch's mean loss, a micro-batch at a time, and the update that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pkm.config.schema import Config
from pkm.device import Compute
from pkm.distributed import dist
from pkm.evaluation.evaluate import UsageMeters, recording
from pkm.model.transformer import Transformer
from pkm.run.run import Run
from pkm.run.stop import REASONS
from pkm.train.optim import LossScale, Optimizers, is_known
from pkm.train.parallel import average_statistics, sync_on_last
from pkm.train.prefetch import Batch
from pkm.train.profiler import profiled
from pkm.train.update_size import UpdateSizes


@dataclass
class Step:
    """What a step found."""

    step: int
    loss: float
    """Mean over the global batch, nats per token."""
    norms: dict[str, float]
    """Of the gradient of each group that is clipped by itself."""
    finite: bool
    """Whether loss and gradient were; else the step moved nothing."""
    loss_scale: dict[str, float]
    """After it."""
    asked: int
    """Place in REASONS of why any rank was asked to stop before it, as far as that was told with the loss."""
    usage: UsageMeters | None = None
    """What memories read and mixtures of experts chose, in steps that are measured."""
    update_sizes: dict[str, float] = field(default_factory=dict)
    """rms of each group's update over rms of its weights, in steps that are measured."""


class TakenStep:
    """A step that was given to the device. `.result()` waits until its numbers have come, not for what was given after it."""

    def __init__(
        self,
        step: int,
        loss: Tensor,
        norms: dict[str, Tensor],
        scale: LossScale,
        asked: Tensor,
        usage: UsageMeters | None,
        sizes: UpdateSizes | None,
    ):
        self.step, self.names, self.usage, self.sizes = step, list(norms), usage, sizes
        numbers = [loss, *norms.values(), scale.value, scale.clean_steps, asked]
        packed = torch.stack([number.to(loss.device, torch.float64) for number in numbers])
        self.arrived: torch.cuda.Event | None = None
        self.numbers = packed
        if packed.is_cuda:
            self.numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self.numbers.copy_(packed, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def result(self) -> Step:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, *norms, value, clean_steps, asked = self.numbers.tolist()
        finite = all(map(math.isfinite, (loss, *norms)))
        record = {"value": value, "clean_steps": int(clean_steps)}
        found = Step(self.step, loss, dict(zip(self.names, norms, strict=True)), finite, record, int(asked))
        if finite:
            found.usage, found.update_sizes = self.usage, self.sizes.result() if self.sizes else {}
        return found


def take_step(
    run: Run, compute: Compute, module: nn.Module, model: Transformer, optim: Optimizers, batch: Batch, scale: LossScale,
    step: int, measures: bool, asked: int = 0,
) -> TakenStep:  # fmt: skip
    """Update the model by one batch, unless something is not finite: then the step leaves no trace but its number.

    module      what is called: the model, or the model with its gradients summed over ranks
    batch       this rank's inputs and targets, and maybe documents, int64 (windows, context)
    measures    also count what the memories read, and how far each group moved
    asked       place in REASONS of why this rank was asked to stop

    Nothing here waits for a GPU: whether a step is skipped is decided there.
    """
    config = run.config
    with profiled(config.profile, step, run.directory):
        torch.manual_seed((config.seed * 1_000_003 + step * 1_009 + dist.rank()) % 2**63)
        buffers = [buffer.clone() for buffer in model.buffers()]
        sizes = optim.update_sizes() if measures else None
        optim.clear()
        optim.begin(step)
        factor = scale.value if scale.active else 1.0
        loss, usage = backward(config, compute, module, model, batch, factor, measures)
        loss, anyone_asked = agree(loss, asked)
        optim.sum_over_ranks()
        norms = {name: norm / factor for name, norm in optim.gradient_norms().items()}
        finite = torch.stack([number.to(loss.device).isfinite() for number in (loss, *norms.values())]).all()
        if not is_known(finite):
            optim.step(step, norms, factor, (~finite).float())
            put_back(
                model, [torch.where(finite, now, saved) for now, saved in zip(model.buffers(), buffers, strict=True)]
            )
        elif finite:
            optim.step(step, norms, factor)
        else:
            put_back(model, buffers)
    scale.update(~finite)
    return TakenStep(step, loss, norms, scale, anyone_asked, usage, sizes)


def backward(
    config: Config, compute: Compute, module: nn.Module, model: Transformer, batch: Batch, scale: float | Tensor,
    measures: bool,
) -> tuple[Tensor, UsageMeters | None]:  # fmt: skip
    """Add the gradient of `scale` times the global batch's mean loss to `.grad`, a micro-batch at a time.

    Returns this rank's part of the global batch's mean loss () fp32, nats per token, and with `measures` what was read and chosen.
    """
    windows = len(batch[0])
    size = config.optim.micro_batch or windows
    usage = UsageMeters(model) if measures else None
    total = torch.zeros((), device=compute.device)
    for first in range(0, windows, size):
        ids, wanted, *documents = (p[first : first + size].to(compute.device, non_blocking=True) for p in batch)
        last = first + size >= windows
        with sync_on_last(module, last), compute.autocast(), recording(model, measures):
            loss = module(ids, wanted, None, *documents) / config.optim.batch_tokens
            (loss * scaling(model, loss.detach(), scale)).backward()
        total += loss.detach()
        if usage is not None:
            usage.update()
    if usage is not None:
        usage.sum_over_ranks()
    average_statistics(model)
    return total, usage


def agree(loss: Tensor, asked: int) -> tuple[Tensor, Tensor]:
    """The sum of the ranks' losses (), and on GPUs, in the same message, the largest of what they were asked (); else 0."""
    if is_known(loss):
        return dist.all_reduce(loss), torch.zeros((), dtype=torch.int64)
    told = torch.zeros(1 + len(REASONS), dtype=loss.dtype, device=loss.device)
    told[0], told[1 + asked] = loss, 1
    dist.all_reduce(told)
    return told[0], ((told[1:] > 0) * torch.arange(len(REASONS), device=loss.device)).max()


def scaling(model: Transformer, loss: Tensor, scale: float | Tensor) -> float | Tensor:
    """`scale`; NaN if the loss of any rank is not finite and values move inside backward, where it is too late to skip the step.

    A gradient of NaN moves nothing, also of tokens whose own part of the loss is finite.
    """
    if all(table.inside_backward is None for table in model.tables().values()):
        return scale
    return torch.where(dist.all_reduce(loss.clone()).isfinite(), scale, math.nan)


def warm_up_ddp(config: Config, compute: Compute, module: nn.Module, model: Transformer, batch: Batch) -> None:
    """One backward pass that leaves nothing behind.

    After its first one DDP lays out its buckets anew, and with them the order in which more than two ranks are added up:
    a resumed run must take its first step with the layout that the run before it had.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    backward(config, compute, module, model, batch, 1.0, measures=False)
    put_back(model, buffers)


def put_back(model: Transformer, buffers: list[Tensor]) -> None:
    """Give the model the running statistics that it had."""
    for buffer, saved in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(saved)
