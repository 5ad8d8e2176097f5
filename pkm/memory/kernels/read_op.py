"""The read of a table and its gradients as torch operators, so that compilers see one node and autograd the right thing.

A table whose rows move sparsely has no K x d gradient. Its operator hands the compact gradient of the rows that were read
to the table itself, or applies it at once; backward finds the table by `table_id`, () int64 on the CPU (an operator takes
tensors and numbers, no objects; and a number would be compiled in). `kernels` is "reference", "torch" or "triton".
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pkm.memory.kernels import adam_step, cpu, reference
from pkm.memory.kernels.adam_step import AdamStep


class Receiver(Protocol):
    """A table as backward sees it."""

    def receive(self, rows: Tensor, values: Tensor) -> None:
        """Take the gradient of one backward pass: rows (U,) int64 ascending and distinct, values (U, d) fp32."""

    def step_inside_backward(self) -> AdamStep | None:
        """The update to apply instead, if it is to happen inside backward."""


RECEIVERS: WeakValueDictionary[int, Receiver] = WeakValueDictionary()


@torch.library.custom_op("pkm::read", mutates_args=())
def read(table: Tensor, indices: Tensor, weights: Tensor, table_id: Tensor, dtype: torch.dtype, kernels: str) -> Tensor:
    """Rows of table (K, d) summed with weights: indices, weights (N, J) -> (N, d) in `dtype`. Indices below 0 add nothing.

    Differentiable by weights, and by the table where it requires a gradient; else its receiver gets the rows'.
    """
    if kernels == "triton":
        from pkm.memory.kernels import triton_read

        return triton_read.read(table, indices, weights, dtype)
    return (cpu.read(table, indices, weights) if kernels == "torch" else reference.read(table, indices, weights)).to(
        dtype
    )


@read.register_fake
def _(table: Tensor, indices: Tensor, weights: Tensor, table_id: Tensor, dtype: torch.dtype, kernels: str) -> Tensor:
    return table.new_empty(indices.shape[0], table.shape[1], dtype=dtype)


@torch.library.custom_op("pkm::read_backward", mutates_args=())
def read_backward(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, table_id: Tensor, kernels: str
) -> Tensor:
    """Gradient of `read` by its weights, (N, J) in their dtype.

    The rows' gradient goes to the `Values` that own the table, looked up by `table_id`; or it is applied at once, where they
    asked for the update inside backward.
    """
    receiver = RECEIVERS.get(int(table_id))
    step = receiver.step_inside_backward() if receiver is not None else None
    if kernels == "triton":
        from pkm.memory.kernels import triton_rows

        dots, rows, values = triton_rows.read_backward(grad, table, indices, weights, receiver is not None, step)
    else:
        way = cpu if kernels == "torch" else reference
        dots = way.weight_gradient(grad, table, indices).to(weights.dtype)
        rows, values = way.row_gradient(grad, indices, weights) if receiver is not None else (None, None)
        if step is not None and rows is not None and values is not None:
            adam_step.update(rows, values, table, step)
    if receiver is not None and step is None and rows is not None and values is not None:
        receiver.receive(rows, values)
    return dots


@read_backward.register_fake
def _(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, table_id: Tensor, kernels: str) -> Tensor:
    return torch.empty_like(weights)


def give_rows(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, table_id: Tensor, kernels: str) -> None:
    """Hand the rows' part of `read_backward` to the table's receiver, if there is one, or apply it where that asks for it."""
    receiver = RECEIVERS.get(int(table_id))
    if receiver is None:
        return
    step = receiver.step_inside_backward()
    if kernels == "triton":
        from pkm.memory.kernels import triton_rows

        rows, values = triton_rows.row_gradient(grad, table, indices, weights, step)
    else:
        rows, values = (cpu if kernels == "torch" else reference).row_gradient(grad, indices, weights)
        if step is not None:
            adam_step.update(rows, values, table, step)
    if step is None and rows is not None and values is not None:
        receiver.receive(rows, values)


@torch.library.custom_op("pkm::read_table_gradient", mutates_args=())
def read_table_gradient(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, kernels: str) -> Tensor:
    """Gradient of `read` by the whole table, (K, d) in its dtype."""
    out = torch.zeros_like(table)
    if kernels == "triton":
        from pkm.memory.kernels import triton_rows

        triton_rows.dense_gradient(grad, table, indices, weights, out)
        return out
    rows, values = (cpu if kernels == "torch" else reference).row_gradient(grad, indices, weights)
    return out.index_copy_(0, rows, values.to(table.dtype))


@read_table_gradient.register_fake
def _(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, kernels: str) -> Tensor:
    return torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, indices, weights, table_id, _, ctx.kernels = inputs
    ctx.save_for_backward(table, indices, weights, table_id)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    table, indices, weights, table_id = ctx.saved_tensors
    by_table = by_weights = None
    if ctx.needs_input_grad[0]:
        by_table = read_table_gradient(grad, table, indices, weights, ctx.kernels)
    if ctx.needs_input_grad[2]:
        by_weights = read_backward(grad, table, indices, weights, table_id, ctx.kernels)
    return by_table, None, by_weights, None, None, None


read.register_autograd(_backward, setup_context=_save)
