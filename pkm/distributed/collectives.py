"""Collectives that backward passes through. R ranks; every rank calls each of them at the same point with the same shapes.

A loss is the sum over the ranks of what each computes, so the gradient of a sum over ranks is again a sum over ranks.
Nothing here depends on the order in which messages arrive: results are the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from pkm.distributed import dist


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return dist.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return dist.all_reduce(grad.contiguous().clone())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # grad[r] is this rank's gradient of rank r's x: send it to rank r, which sums what it receives.
        return _all_to_all(grad).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_to_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_to_all(grad)


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of x over all ranks, on each of them; differentiable."""
    return x if dist.world_size() == 1 else _Sum.apply(x)


def gather(x: Tensor) -> Tensor:
    """x (...) of every rank, (R, ...) on each of them; no gradient."""
    parts = torch.empty(dist.world_size(), *x.shape, dtype=x.dtype, device=x.device)
    td.all_gather(list(parts.unbind()), x.contiguous())
    return parts


def gather_differentiably(x: Tensor) -> Tensor:
    """As `gather`, differentiable: backward sums all ranks' gradients of this rank's x."""
    return _Gather.apply(x)


def exchange(x: Tensor) -> Tensor:
    """x (R, ...): part r goes to rank r -> (R, ...): part r came from rank r; differentiable."""
    return _Exchange.apply(x)


def _all_to_all(x: Tensor) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    td.all_to_all_single(received, x.contiguous())
    return received
