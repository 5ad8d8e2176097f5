"""Mean and variance of columns on a GPU, in one pass over the matrix, and their way back.

Shapes: N rows, F columns, B blocks of ROWS rows.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 64


@triton.jit
def _counted(mask, row, N, MASKED: tl.constexpr):
    """(ROWS,): which rows count."""
    counted = row < N
    if MASKED:
        counted = counted & (tl.load(mask + row, mask=counted, other=0) != 0)
    return counted


@triton.jit
def parts_kernel(
    x, mask, means, squares, counts, N, F, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """x (N, F) -> of each block: count (B,), means (B, F) and sums of squared distances from them (B, F)."""
    block = tl.program_id(0).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counted = _counted(mask, row, N, MASKED)
    ok = counted[:, None] & (column < F)[None, :]
    v = tl.load(x + row[:, None] * F + column[None, :], mask=ok, other=0.0).to(tl.float32)
    count = tl.sum(counted.to(tl.float32), 0)
    mean = tl.sum(v, 0) / tl.maximum(count, 1.0)
    distance = tl.where(ok, v - mean[None, :], 0.0)
    tl.store(means + block * F + column, mean, mask=column < F)
    tl.store(squares + block * F + column, tl.sum(distance * distance, 0), mask=column < F)
    tl.store(counts + block, count)


@triton.jit
def join_kernel(
    means, squares, counts, mean_out, var_out, count_out, B, F, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Chan et al.: the blocks' means and squares -> mean and biased variance (F,) and the count of all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    n = 0.0
    for start in range(0, B, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        count = tl.load(counts + b, mask=b < B, other=0.0)
        ok = (b < B)[:, None] & (column < F)[None, :]
        total += tl.sum(tl.load(means + b[:, None] * F + column[None, :], mask=ok, other=0.0) * count[:, None], 0)
        n += tl.sum(count, 0)
    mean = total / tl.maximum(n, 1.0)
    squares_sum = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, B, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        count = tl.load(counts + b, mask=b < B, other=0.0)
        ok = (b < B)[:, None] & (column < F)[None, :]
        away = tl.load(means + b[:, None] * F + column[None, :], mask=ok, other=0.0) - mean[None, :]
        away = tl.where(ok, away, 0.0)
        squares_sum += tl.sum(
            tl.load(squares + b[:, None] * F + column[None, :], mask=ok, other=0.0) + away * away * count[:, None], 0
        )
    tl.store(mean_out + column, mean, mask=column < F)
    tl.store(var_out + column, squares_sum / tl.maximum(n, 1.0), mask=column < F)
    tl.store(count_out, n)


@triton.jit
def backward_kernel(
    x, mask, mean, by_mean, by_var, count, out, N, F, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out (N, F) = (by_mean + 2 (x - mean) by_var) / count, 0 in rows that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (column < F)[None, :]
    counted = _counted(mask, row, N, MASKED)[:, None] & inside
    at = row[:, None] * F + column[None, :]
    v = tl.load(x + at, mask=counted, other=0.0).to(tl.float32)
    m = tl.load(mean + column, mask=column < F, other=0.0)
    a = tl.load(by_mean + column, mask=column < F, other=0.0)
    b = tl.load(by_var + column, mask=column < F, other=0.0)
    grad = (a[None, :] + 2.0 * (v - m[None, :]) * b[None, :]) / tl.maximum(tl.load(count), 1.0)
    tl.store(out + at, tl.where(counted, grad, 0.0).to(out.dtype.element_ty), mask=inside)


def column_statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, F), mask (N,) bool or None -> mean (F,), biased variance (F,), count (), all fp32."""
    rows, features = x.shape
    blocks = max(1, triton.cdiv(rows, ROWS))
    new = x.new_empty
    means, squares = (new(blocks, features, dtype=torch.float32) for _ in range(2))
    counts, count = new(blocks, dtype=torch.float32), new((), dtype=torch.float32)
    mean, var = (new(features, dtype=torch.float32) for _ in range(2))
    grid = (blocks, triton.cdiv(features, COLUMNS))
    parts_kernel[grid](
        x,
        x if mask is None else mask,
        means,
        squares,
        counts,
        rows,
        features,
        mask is not None,
        ROWS,
        COLUMNS,
        num_warps=4,
    )
    join_kernel[(triton.cdiv(features, 16),)](
        means, squares, counts, mean, var, count, blocks, features, 128, 16, num_warps=4
    )
    return mean, var, count


def column_statistics_backward(
    by_mean: Tensor, by_var: Tensor, x: Tensor, mask: Tensor | None, mean: Tensor, count: Tensor
) -> Tensor:
    """Gradient by x (N, F), in its dtype, of mean and variance whose gradients are (F,)."""
    out = torch.empty_like(x)
    rows, features = x.shape
    grid = (max(1, triton.cdiv(rows, 32)), triton.cdiv(features, 128))
    backward_kernel[grid](
        x, x if mask is None else mask, mean, by_mean.contiguous(), by_var.contiguous(), count, out, rows, features,
        mask is not None, 32, 128, num_warps=4,
    )  # fmt: skip
    return out
