"""Products of each token with the rows that it reads, and their gradients, as torch operators.

The other half of a read: where `read_op` sums rows, this multiplies with them, and its way back is a weighted read of the same
rows and one of the tokens, sorted by row. A table's rows move as in `read_op`.

Shapes: N tokens, J reads of a token, K rows of width D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pkm.memory.kernels import cpu, read_op, reference


@torch.library.custom_op("pkm::dots", mutates_args=())
def dots(x: Tensor, table: Tensor, indices: Tensor, table_id: Tensor, kernels: str) -> Tensor:
    """x (N, D) . rows of table (K, D): indices (N, J) -> (N, J), at least fp32; 0 where an index is below 0.

    Differentiable by x, and by the table where it requires a gradient; else its receiver gets the rows'.
    """
    if kernels == "triton":
        from pkm.memory.kernels import triton_dots

        return triton_dots.dots(x, table, indices)
    return (cpu if kernels == "torch" else reference).weight_gradient(x, table, indices)


@dots.register_fake
def _(x: Tensor, table: Tensor, indices: Tensor, table_id: Tensor, kernels: str) -> Tensor:
    return x.new_empty(indices.shape, dtype=reference.at_least_fp32(table.dtype))


@torch.library.custom_op("pkm::dots_backward", mutates_args=())
def dots_backward(grad: Tensor, x: Tensor, table: Tensor, indices: Tensor, table_id: Tensor, kernels: str) -> Tensor:
    """Gradient of `dots` by x, (N, D) in its dtype; the rows' goes to the table's receiver, or is applied at once."""
    if kernels == "triton":
        from pkm.memory.kernels import triton_read

        by_x = triton_read.read(table, indices, grad, x.dtype)
    else:
        by_x = (cpu if kernels == "torch" else reference).read(table, indices, grad).to(x.dtype)
    # Only now: an update inside backward moves the rows that were read here.
    read_op.give_rows(x, table, indices, grad, table_id, kernels)
    return by_x


@dots_backward.register_fake
def _(grad: Tensor, x: Tensor, table: Tensor, indices: Tensor, table_id: Tensor, kernels: str) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, indices, table_id, ctx.kernels = inputs
    ctx.save_for_backward(x, table, indices, table_id)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, table, indices, table_id = ctx.saved_tensors
    by_x = by_table = None
    if ctx.needs_input_grad[1]:
        by_table = read_op.read_table_gradient(x, table, indices, grad, ctx.kernels)
    if ctx.needs_input_grad[0]:
        by_x = dots_backward(grad, x, table, indices, table_id, ctx.kernels)
    return by_x, by_table, None, None, None


dots.register_autograd(_backward, setup_context=_save)
