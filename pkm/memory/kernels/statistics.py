"""Mean and variance of columns, and running averages of them, as torch operators."""

from __future__ import annotations

import torch
from torch import Tensor


def column_statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, F), mask (N,) bool, True = counts -> mean (F,), biased variance (F,), count (); at least fp32, differentiable.

    No row that counts gives mean and variance 0.
    """
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if mask is None:
        var, mean = torch.var_mean(x, dim=0, correction=0)
        return mean, var, torch.full((), float(x.shape[0]), dtype=x.dtype, device=x.device)
    rows = mask.to(x.dtype).unsqueeze(1)
    count = rows.sum()
    # `where`, not a product: padding may hold anything, NaN included.
    mean = torch.where(mask.unsqueeze(1), x, 0.0).sum(0) / count.clamp(min=1)
    var = torch.where(mask.unsqueeze(1), x - mean, 0.0).square().sum(0) / count.clamp(min=1)
    return mean, var, count


@torch.library.custom_op("pkm::update_running", mutates_args=("running_mean", "running_var"))
def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, count: Tensor, momentum: float
) -> None:
    """running <- (1 - momentum) * running + momentum * new, in place; the variance made unbiased over `count` tokens.

    Does nothing inside backward: there, activation checkpointing is recomputing a batch that was counted already. As
    an operator, so that this is asked when it runs, also in a compiled graph. Fewer than 2 tokens leave no trace.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    rate = torch.where(count > 1, momentum, 0.0).to(running_mean.dtype)
    unbiased = var * (count / (count - 1).clamp(min=1))
    running_mean.lerp_(mean.to(running_mean.dtype), rate)
    running_var.lerp_(unbiased.to(running_var.dtype), rate)


@update_running.register_fake
def _(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, count: Tensor, momentum: float) -> None:
    return None
