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
def dots(x: Tensor, table: Tensor, indices: Tensor, kernels: str) -> Tensor:
    """x (N, D) . rows of table (K, D): indices (N, J) -> (N, J), at least fp32; 0 where an index is below 0.

    Differentiable by x, and by the table where it requires a gradient; else its receiver gets the rows'.
    """
    if kernels == "triton":
        from pkm.memory.kernels import triton_dots

        return triton_dots.dots(x, table, indices)
    return (cpu if kernels == "torch" else reference).weight_gradient(x, table, indices)


@dots.register_fake
def _(x: Tensor, table: Tensor, indices: Tensor, kernels: str) -> Tensor:
    return x.new_empty(indices.shape, dtype=reference.at_least_fp32(table.dtype))


@torch.library.custom_op("pkm::dots_backward", mutates_args=())
def dots_backward(
    grad: Tensor, x: Tensor, table: Tensor, indices: Tensor, kernels: str, dense: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of `dots` by x, (N, D) in its dtype, and with `dense` by the table, (K, D) in its dtype.

    Without, the rows' goes to the table's receiver, or is applied at once.
    """
    if kernels == "triton":
        from pkm.memory.kernels import triton_read

        by_x = triton_read.read(table, indices, grad, x.dtype)
    else:
        by_x = (cpu if kernels == "torch" else reference).read(table, indices, grad).to(x.dtype)
    # Only now: an update inside backward moves the rows that were read here.
    return by_x, read_op.gradients(x, table, indices, grad, [], kernels, dense, by_weights=False)[1]


@dots_backward.register_fake
def _(grad: Tensor, x: Tensor, table: Tensor, indices: Tensor, kernels: str, dense: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), table.new_empty(table.shape if dense else (0, table.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, indices, ctx.kernels = inputs
    ctx.save_for_backward(x, table, indices)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, table, indices = ctx.saved_tensors
    dense = ctx.needs_input_grad[1]
    by_x, by_table = dots_backward(grad, x, table, indices, ctx.kernels, dense)
    return by_x, by_table if dense else None, None, None


dots.register_autograd(_backward, setup_context=_save)
