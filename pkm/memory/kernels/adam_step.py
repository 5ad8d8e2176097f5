"""Lazy Adam on the rows of a table that were read: what a step is, and how plain PyTorch takes it.

Shapes: K rows of width D, U rows to update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pkm.memory.kernels import cpu

AT_ONCE = 1 << 16  # numbers that the update of plain PyTorch takes at a time: a core's cache holds them


@dataclass(frozen=True)
class AdamStep:
    """One update with everything it needs but rows and gradients."""

    mean: Tensor
    """(K, D) fp32 or bf16: first moment, in place."""
    square: Tensor
    """(K, D) fp32 or bf16: second moment, in place."""
    master: Tensor | None
    """(K, D) fp32 copy that is updated and from which the table is rounded; None if the table itself is updated."""
    lr: float
    betas: tuple[float, float]
    eps: float
    step: int
    """Global, from 1: bias correction counts all steps, not those that read a row."""
    seed: int
    """Of stochastic rounding: below 2^31, another for every step and table."""

    def numbers(self) -> tuple[float, ...]:
        """lr, b1, 1 - b1, b2, 1 - b2, bias corrections of mean and square, eps; each rounded to fp32 once."""
        b1, b2 = self.betas
        return self.lr, b1, 1 - b1, b2, 1 - b2, 1 - b1**self.step, 1 - b2**self.step, self.eps


def update(rows: Tensor, grad: Tensor, table: Tensor, step: AdamStep) -> None:
    """Adam on rows (U,) of table (K, D) with their gradients (U, D) fp32, in place."""
    tensors = (grad, table, step.mean, step.square)
    if step.master is None and all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors):
        code = cpu.compiled(grad.numel())
        if code is not None:
            of_rows = [t.contiguous().numpy() for t in (rows, grad)]
            whole = [t.detach().numpy() for t in tensors[1:]]
            each = -(-len(rows) // torch.get_num_threads())
            parts = [[t[first : first + each] for t in of_rows] for first in range(0, len(rows), each)]
            return cpu.in_threads(code.adam, [(*part, *whole, np.array(step.numbers(), np.float32)) for part in parts])
    lr, b1, one_b1, b2, one_b2, c1, c2, eps = step.numbers()
    generator = torch.Generator(table.device).manual_seed(step.seed)
    source = table if step.master is None else step.master
    at_once = max(1, AT_ONCE // table.shape[1])
    for part, g in zip(rows.split(at_once), grad.split(at_once), strict=True):
        m = step.mean.index_select(0, part).to(g.dtype).mul_(b1).add_(g, alpha=one_b1)
        v = step.square.index_select(0, part).to(g.dtype).mul_(b2).addcmul_(g, g, value=one_b2)
        x = source.index_select(0, part).to(g.dtype)
        denominator = (v / c2).sqrt_().add_(eps)
        x.addcdiv_(m, denominator, value=-lr / c1)
        step.mean.index_copy_(0, part, rounded(m, step.mean.dtype, generator))
        step.square.index_copy_(0, part, rounded(v, step.square.dtype, generator))
        if step.master is None:
            table.index_copy_(0, part, rounded(x, table.dtype, generator))
        else:
            step.master.index_copy_(0, part, x.to(step.master.dtype))
            table.index_copy_(0, part, x.to(table.dtype))


def rounded(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """x in `dtype`; fp32 to bf16 stochastically: up with the probability of its distance from the neighbour towards 0.

    The expected value is x, so that updates smaller than half a step of bf16 add up instead of being lost.
    """
    if dtype is not torch.bfloat16 or x.dtype is not torch.float32:
        return x.to(dtype)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = (x.contiguous().view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).to(torch.bfloat16)
