"""Adam on single rows of a table, on a GPU.

Shapes: K rows of width D, U rows to update.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pkm.memory.kernels import adam_step
from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.kernels.row_sum import RowSum

LARGEST = tl.constexpr(adam_step.LARGEST)
ROW, COLUMN = tl.constexpr(adam_step.ROW), tl.constexpr(adam_step.COLUMN)


@triton.jit
def _mix(x):
    """As `adam_step._mixed`."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, noise, like: tl.constexpr):
    """x fp32 in dtype `like`; in bf16 up with the probability of its distance from the lower neighbour (noise: 16 bits)."""
    if like == tl.bfloat16:
        bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(like)


@triton.jit
def adam_row(grad, slot, d, D: tl.constexpr, table, mean, square, master, numbers, MASTER: tl.constexpr):
    """Adam with gradient `grad` fp32 on columns d of row `slot`; as in `adam_step.update`, what is not finite moves nothing.

    numbers (10,) fp32: `AdamStep.words`. In memory, so that a graph of launches
    that is played again finds those of its step.
    """
    lr, b1, one_b1 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    b2, one_b2 = tl.load(numbers + 3), tl.load(numbers + 4)
    c1, c2, eps = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    seed = tl.load(numbers + 8).to(tl.uint32, bitcast=True)
    ok = d < D
    at = slot * D + d
    # Rows and moments pass by once: L2 is for what is read again.
    m_old = tl.load(mean + at, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
    v_old = tl.load(square + at, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
    source = master if MASTER else table
    x_old = tl.load(source + at, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
    # Chosen with `where`, not with masks: a mask of numbers would make every access a single one.
    m = m_old * b1 + grad * one_b1
    v = v_old * b2 + grad * grad * one_b2
    x = x_old * tl.load(numbers + 9) - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    moves = (tl.abs(m) < LARGEST) & (v < LARGEST) & (tl.abs(x) < LARGEST)
    m, v, x = tl.where(moves, m, m_old), tl.where(moves, v, v_old), tl.where(moves, x, x_old)
    noise = _mix((slot * ROW).to(tl.uint32) + d.to(tl.uint32) * COLUMN + seed)
    tl.store(mean + at, _rounded(m, noise & 0xFFFF, mean.dtype.element_ty), mask=ok, eviction_policy="evict_first")
    tl.store(square + at, _rounded(v, noise >> 16, square.dtype.element_ty), mask=ok, eviction_policy="evict_first")
    if MASTER:
        tl.store(master + at, x, mask=ok, eviction_policy="evict_first")
        tl.store(table + at, x.to(table.dtype.element_ty), mask=ok, eviction_policy="evict_first")
    else:
        x = _rounded(x, _mix(noise) & 0xFFFF, table.dtype.element_ty)
        tl.store(table + at, x, mask=ok, eviction_policy="evict_first")


@triton.jit
def adam_kernel(
    rows, grad, count, factor, table, mean, square, master, numbers,
    D: tl.constexpr, BD: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """The first count[0] of rows (U,) with factor[0] times their gradients (U, D) fp32: BD columns of every so many-th row a
    program. A factor of NaN moves nothing."""
    scale = tl.load(factor)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    for place in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        slot = tl.load(rows + place).to(tl.int64)
        at = grad + tl.cast(place, tl.int64) * D + d
        g = tl.load(at, mask=d < D, other=0.0, eviction_policy="evict_first") * scale
        adam_row(g, slot, d, D, table, mean, square, master, numbers, MASTER)


PROGRAMS = 1 << 16


def update(rows: Tensor, grad: Tensor, table: Tensor, step: AdamStep) -> None:
    """Adam on rows (U,) of table (K, D) with their gradients (U, D) fp32, in place."""
    count = torch.full((1,), len(rows), dtype=torch.int32, device=table.device)
    _update(rows, grad, count, torch.ones(1, device=table.device), table, step)


def update_sum(total: RowSum, factor: Tensor, table: Tensor, step: AdamStep) -> None:
    """Adam on the rows of table (K, D) that `total` holds, with `factor` () fp32 times their gradients; NaN: not at all."""
    _update(total.rows, total.values, total.state[1:], factor, table, step)


def _update(rows: Tensor, grad: Tensor, count: Tensor, factor: Tensor, table: Tensor, step: AdamStep) -> None:
    if not len(rows):
        return
    dim = table.shape[1]
    columns = min(triton.next_power_of_2(dim), 1024)
    adam_kernel[(min(len(rows), PROGRAMS), triton.cdiv(dim, columns))](
        rows, grad, count, factor, table, step.mean, step.square, table if step.master is None else step.master,
        numbers_of(step, table.device), dim, columns, step.master is not None, num_warps=4,
    )  # fmt: skip


def numbers_of(step: AdamStep, device: torch.device) -> Tensor:
    """(10,) fp32 on the device: what the kernels need of a step; sent there without waiting."""
    if step.on_device is not None:
        return step.on_device
    return step.words().to(device, non_blocking=True)
