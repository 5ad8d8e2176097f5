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
LARGEST = 3e38
"""What would move beyond it stays where it is; rounded up, it still has a bf16."""


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
    first_column: int = 0
    """Of the whole table, where this is a rank's part of it: a number is rounded alike whichever rank has it."""
    decay: float = 0.0
    """Of a row's numbers before it moves; only kernels of a GPU know of it."""
    on_device: Tensor | None = None
    """`words`, where the table is a GPU's."""

    def words(self) -> Tensor:
        """(10,) fp32: `numbers`, the bits of `noise_seed`, 1 - `decay`; pinned where there is a GPU to send them to."""
        words = torch.empty(10)
        words[:8] = torch.tensor(self.numbers())
        words.view(torch.int32)[8] = self.noise_seed()
        words[9] = 1 - self.decay
        return words.pin_memory() if torch.cuda.is_available() else words

    def noise_seed(self) -> int:
        """What is added to a number's hash in this table, signed 32 bits; it takes the first column in."""
        return _signed(self.seed + self.first_column * COLUMN)

    def numbers(self) -> tuple[float, ...]:
        """lr, b1, 1 - b1, b2, 1 - b2, bias corrections of mean and square, eps; each rounded to fp32 once."""
        b1, b2 = self.betas
        return self.lr, b1, 1 - b1, b2, 1 - b2, 1 - b1**self.step, 1 - b2**self.step, self.eps


# Odd constants of 32 bits: of a row and of a column in a number's hash, and of the finalizer of MurmurHash3.
ROW, COLUMN, MIX = 0x9E3779B1, 0x85EBCA77, (0x85EBCA6B, 0xC2B2AE35)


def update(rows: Tensor, grad: Tensor, table: Tensor, step: AdamStep) -> None:
    """Adam on rows (U,) of table (K, D) with their gradients (U, D) fp32, in place.

    Where the gradient, a moment or the number itself would not be finite, nothing moves.
    """
    if not grad.numel():
        return
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
    source = table if step.master is None else step.master
    at_once = max(1, AT_ONCE // table.shape[1])
    for part, g in zip(rows.split(at_once), grad.split(at_once), strict=True):
        m = step.mean.index_select(0, part).to(g.dtype).mul_(b1).add_(g, alpha=one_b1)
        v = step.square.index_select(0, part).to(g.dtype).mul_(b2).addcmul_(g, g, value=one_b2)
        x = source.index_select(0, part).to(g.dtype)
        denominator = (v / c2).sqrt_().add_(eps)
        x.addcdiv_(m, denominator, value=-lr / c1)
        # A mean that is not finite leaves no number finite, and no square is below 0.
        if not all(bool(_moves(end)) for end in (v.max(), *x.aminmax())):
            moves = _moves(m) & _moves(v) & _moves(x)
            old = (t.index_select(0, part).to(g.dtype) for t in (step.mean, step.square, source))
            m, v, x = (torch.where(moves, new, kept) for new, kept in zip((m, v, x), old, strict=True))
        noise = _noise(part, table.shape[1], step.noise_seed()) if _rounds(table, step) else None
        step.mean.index_copy_(0, part, rounded(m, step.mean.dtype, noise, 0))
        step.square.index_copy_(0, part, rounded(v, step.square.dtype, noise, 1))
        if step.master is None:
            table.index_copy_(0, part, rounded(x, table.dtype, noise, 2))
        else:
            step.master.index_copy_(0, part, x.to(step.master.dtype))
            table.index_copy_(0, part, x.to(table.dtype))


def _moves(x: Tensor) -> Tensor:
    """Where x is a number that may be stored; NaN is none."""
    return x.abs() < LARGEST


def _rounds(table: Tensor, step: AdamStep) -> bool:
    """Whether anything is rounded stochastically."""
    kept = [step.mean, step.square, *([table] if step.master is None else [])]
    return any(t.dtype is torch.bfloat16 for t in kept)


def rounded(x: Tensor, dtype: torch.dtype, noise: Tensor | None, use: int) -> Tensor:
    """x in `dtype`; fp32 to bf16 stochastically: up with the probability of its distance from the neighbour towards 0.

    noise    as of `_noise`, wherever `dtype` is bf16
    use      which of the three independent 16 bits that it has room for: 0, 1, 2

    The expected value is x, so that updates smaller than half a step of bf16 add up instead of being lost.
    """
    if dtype is not torch.bfloat16 or x.dtype is not torch.float32 or noise is None:
        return x.to(dtype)
    bits = (noise if use == 0 else noise >> 16 if use == 1 else _mixed(noise.clone())) & 0xFFFF
    return bits.add_(x.contiguous().view(torch.int32)).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def _noise(rows: Tensor, width: int, seed: int) -> Tensor:
    """A hash of row, column and seed for each number of rows (U,): int32 (U, width), as the Triton kernels make it."""
    columns = torch.arange(width, device=rows.device) * COLUMN + seed
    return _mixed((rows * ROW).to(torch.int32).unsqueeze(1) + columns.to(torch.int32))


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3, in place, on int32: each bit of x changes about half of the result's."""
    for shift, factor in ((16, MIX[0]), (13, MIX[1]), (16, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x


def _signed(x: int) -> int:
    """The lower 32 bits of x, with a sign."""
    return (x + 2**31) % 2**32 - 2**31
