"""Mean and variance of columns, and running averages of them, as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pkm.memory.kernels.reference import at_least_fp32

BUFFERED = 1 << 18  # numbers


def column_statistics(x: Tensor, mask: Tensor | None, kernels: str = "reference") -> tuple[Tensor, Tensor, Tensor]:
    """x (N, F), mask (N,) bool, True = counts -> mean (F,), biased variance (F,), count (); at least fp32, differentiable.

    No row that counts gives mean and variance 0. kernels: "reference" (which `autograd` goes through), "torch" or "triton".
    """
    if kernels == "reference":
        return _plain_statistics(x, mask)
    return _column_statistics(x.contiguous(), mask, kernels)


def _plain_statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x = x.to(at_least_fp32(x.dtype))
    if len(x) == 0:
        mask = torch.ones(0, dtype=torch.bool, device=x.device)
    if mask is None:
        mean = x.mean(0)
        return mean, (x - mean).square().mean(0), torch.full((), float(x.shape[0]), dtype=x.dtype, device=x.device)
    count = mask.to(x.dtype).sum()
    # `where`, not a product: padding may hold anything, NaN included.
    mean = torch.where(mask.unsqueeze(1), x, 0.0).sum(0) / count.clamp(min=1)
    var = torch.where(mask.unsqueeze(1), x - mean, 0.0).square().sum(0) / count.clamp(min=1)
    return mean, var, count


@torch.library.custom_op("pkm::column_statistics", mutates_args=())
def _column_statistics(x: Tensor, mask: Tensor | None, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    if len(x) == 0:  # as where all is padding
        mean = x.new_zeros(x.shape[1], dtype=at_least_fp32(x.dtype))
        return mean, mean.clone(), mean.new_zeros(())
    if kernels == "triton":
        from pkm.memory.kernels import triton_statistics

        return triton_statistics.column_statistics(x, mask)
    if mask is not None and not bool(mask.all()):
        return _plain_statistics(x, mask)
    # Sums over rows as products with a row of ones: several times as fast as torch's own on a CPU. Distances from the
    # mean go through one buffer that caches hold, not through memory.
    dtype, count = at_least_fp32(x.dtype), float(len(x))
    rows = max(1, BUFFERED // x.shape[1])
    ones, buffer = x.new_ones(1, rows, dtype=dtype), x.new_empty(min(rows, len(x)), x.shape[1], dtype=dtype)
    mean, var = x.new_zeros(1, x.shape[1], dtype=dtype), x.new_zeros(1, x.shape[1], dtype=dtype)
    for part in x.split(rows):
        mean.addmm_(ones[:, : len(part)], part.to(dtype), alpha=1 / count)
    for part in x.split(rows):
        distance = torch.sub(part, mean, out=buffer[: len(part)]).square_()
        var.addmm_(ones[:, : len(part)], distance, alpha=1 / count)
    return mean.squeeze(0), var.squeeze(0), x.new_tensor(count, dtype=dtype)


@_column_statistics.register_fake
def _(x: Tensor, mask: Tensor | None, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[1], dtype=at_least_fp32(x.dtype))
    return mean, torch.empty_like(mean), mean.new_empty(())


@torch.library.custom_op("pkm::column_statistics_backward", mutates_args=())
def _column_statistics_backward(
    by_mean: Tensor, by_var: Tensor, x: Tensor, mask: Tensor | None, mean: Tensor, count: Tensor, kernels: str
) -> Tensor:
    if kernels == "triton":
        from pkm.memory.kernels import triton_statistics

        return triton_statistics.column_statistics_backward(by_mean, by_var, x, mask, mean, count)
    slope = 2 * by_var / count.clamp(min=1)
    offset, grad = by_mean / count.clamp(min=1) - slope * mean, torch.empty_like(x)
    rows = max(1, BUFFERED // x.shape[1])
    for part, out in zip(x.split(rows), grad.split(rows), strict=True):
        out.copy_(torch.addcmul(offset, part.to(mean.dtype), slope))
    return grad if mask is None or bool(mask.all()) else torch.where(mask.unsqueeze(1), grad, 0.0)


@_column_statistics_backward.register_fake
def _(
    by_mean: Tensor, by_var: Tensor, x: Tensor, mask: Tensor | None, mean: Tensor, count: Tensor, kernels: str
) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.mask, ctx.kernels = inputs
    mean, _, count = output
    ctx.mark_non_differentiable(count)
    ctx.save_for_backward(x, mean, count)


def _backward(ctx: Any, by_mean: Tensor, by_var: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    x, mean, count = ctx.saved_tensors
    return _column_statistics_backward(by_mean, by_var, x, ctx.mask, mean, count, ctx.kernels), None, None


_column_statistics.register_autograd(_backward, setup_context=_save)


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
