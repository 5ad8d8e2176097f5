"""Adam on single rows of a table, on a GPU.

Shapes: K rows of width D, U rows to update.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pkm.memory.kernels import adam_step
from pkm.memory.kernels.adam_step import AdamStep

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
def adam_row(
    grad, slot, d, D: tl.constexpr, table, mean, square, master, seed,
    lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER: tl.constexpr,
):  # fmt: skip
    """Adam with gradient `grad` fp32 on columns d of row `slot`; as in `adam_step.update`, what is not finite moves nothing."""
    ok = d < D
    at = slot * D + d
    m_old = tl.load(mean + at, mask=ok, other=0.0).to(tl.float32)
    v_old = tl.load(square + at, mask=ok, other=0.0).to(tl.float32)
    source = master if MASTER else table
    x_old = tl.load(source + at, mask=ok, other=0.0).to(tl.float32)
    # Chosen with `where`, not with masks: a mask of numbers would make every access a single one.
    m = m_old * b1 + grad * one_b1
    v = v_old * b2 + grad * grad * one_b2
    x = x_old - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    moves = (tl.abs(m) < LARGEST) & (v < LARGEST) & (tl.abs(x) < LARGEST)
    m, v, x = tl.where(moves, m, m_old), tl.where(moves, v, v_old), tl.where(moves, x, x_old)
    noise = _mix((slot * ROW).to(tl.uint32) + d.to(tl.uint32) * COLUMN + seed.to(tl.uint32))
    tl.store(mean + at, _rounded(m, noise & 0xFFFF, mean.dtype.element_ty), mask=ok)
    tl.store(square + at, _rounded(v, noise >> 16, square.dtype.element_ty), mask=ok)
    if MASTER:
        tl.store(master + at, x, mask=ok)
        tl.store(table + at, x.to(table.dtype.element_ty), mask=ok)
    else:
        tl.store(table + at, _rounded(x, _mix(noise) & 0xFFFF, table.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["seed"])
def adam_kernel(
    rows, grad, table, mean, square, master, seed, lr, b1, one_b1, b2, one_b2, c1, c2, eps,
    D: tl.constexpr, BD: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """rows (U,), grad (U, D) fp32: one row and BD columns a program."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + place).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    g = tl.load(grad + place * D + d, mask=d < D, other=0.0)
    adam_row(g, slot, d, D, table, mean, square, master, seed, lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER)


def update(rows: Tensor, grad: Tensor, table: Tensor, step: AdamStep) -> None:
    """Adam on rows (U,) of table (K, D) with their gradients (U, D) fp32, in place."""
    if not len(rows):
        return
    dim = table.shape[1]
    columns = min(triton.next_power_of_2(dim), 1024)
    master = step.master if step.master is not None else table
    adam_kernel[(len(rows), triton.cdiv(dim, columns))](
        rows, grad, table, step.mean, step.square, master, step.noise_seed(), *step.numbers(), dim, columns,
        step.master is not None, num_warps=4,
    )  # fmt: skip
