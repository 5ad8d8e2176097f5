"""Products of each token with the rows that it reads, on a GPU.

Shapes: N tokens, J reads of a token, K rows of width D.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def dots_kernel(x, table, indices, out, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr):
    """One token and BJ of its reads a program."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    row = tl.load(indices + token * J + j, mask=j < J, other=-1).to(tl.int64)
    total = tl.zeros([BJ], dtype=tl.float32)
    for column in range(0, D, BD):
        d = column + tl.arange(0, BD)
        there = (row >= 0)[:, None] & (d < D)[None, :]
        v = tl.load(table + row[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(v * tl.load(x + token * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :], 1)
    tl.store(out + token * J + j, total, mask=j < J)


COLUMNS = 128
ROWS = 16
WARPS = 2


def dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """x (N, D) . rows of table (K, D): indices (N, J) -> (N, J) fp32; 0 where an index is below 0."""
    tokens, reads = indices.shape
    dim = table.shape[1]
    out = torch.empty(tokens, reads, dtype=torch.float32, device=table.device)
    if out.numel():
        columns = min(COLUMNS, triton.next_power_of_2(dim))
        dots_kernel[(tokens, triton.cdiv(reads, ROWS))](
            x.contiguous(), table.contiguous(), indices.contiguous(), out, reads, dim, columns, ROWS, num_warps=WARPS
        )
    return out
