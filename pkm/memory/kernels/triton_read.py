"""The weighted read of rows on a GPU.

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
def read_kernel(
    table, indices, weights, out, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr
):  # fmt: skip
    """One token and BD columns a program. Columns are the outer dimension of the grid: while all tokens read one slice
    of columns, that slice of the rows in use stays in the L2 cache."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], dtype=tl.float32)
    for start in range(0, J, BJ):
        j = start + tl.arange(0, BJ)
        row = tl.load(indices + token * J + j, mask=j < J, other=-1).to(tl.int64)
        w = tl.load(weights + token * J + j, mask=j < J, other=0.0)
        there = (row >= 0)[:, None] & (d < D)[None, :]
        v = tl.load(table + row[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(v * w[:, None], 0)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


# Measured on an H100; see benchmarks/results/memory-h100.md.
READ_BYTES = 128
"""Of a row at a time: those of all rows in use are to stay in L2, whatever they are kept in."""
READ_ROWS = 32
READ_WARPS = 1


def read(table: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of table (K, D) summed with weights: indices, weights (N, J) -> (N, D) in `dtype`; indices below 0 add nothing."""
    tokens, reads = indices.shape
    dim = table.shape[1]
    out = torch.empty(tokens, dim, dtype=dtype, device=table.device)
    if out.numel():
        columns = min(READ_BYTES // table.element_size(), triton.next_power_of_2(dim))
        grid = (tokens, triton.cdiv(dim, columns))
        read_kernel[grid](
            table.contiguous(), indices.contiguous(), weights.float().contiguous(), out, reads, dim, columns, READ_ROWS,
            num_warps=READ_WARPS,
        )  # fmt: skip
    return out
