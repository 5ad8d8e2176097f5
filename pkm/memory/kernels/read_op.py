"""The read of a table and its gradients as torch operators, so that compilers see one node and autograd the right thing.

A table whose rows move sparsely has no K x d gradient. Its operator hands the compact gradient of the rows that were read
to the table itself, or applies it at once; backward finds the table by where its numbers are (an operator takes tensors and
numbers, no objects; and a number would be compiled in). `kernels` is "reference", "torch" or "triton".
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from pkm.memory.kernels import adam_step, cpu, reference
from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.kernels.row_sum import RowSum


class Receiver(Protocol):
    """A table as backward sees it."""

    @property
    def weight(self) -> Tensor:
        """(K, d)."""

    def receive(self, rows: Tensor, values: Tensor) -> None:
        """Take the gradient of one backward pass: rows (U,) int64 ascending and distinct, values (U, d) fp32."""

    def row_sum(self) -> RowSum:
        """What a GPU adds the gradient of one backward pass to, instead."""

    def step_inside_backward(self) -> AdamStep | None:
        """The update to apply instead, if it is to happen inside backward."""

    def __hash__(self) -> int: ...


RECEIVERS: WeakSet[Receiver] = WeakSet()


@torch.library.custom_op("pkm::plan_rows", mutates_args=())
def plan_rows(indices: Tensor) -> list[Tensor]:
    """The reads (N, J) of a batch sorted by row, for backward by Triton: see `triton_rows.Plan`."""
    from pkm.memory.kernels import triton_rows

    return list(triton_rows.plan(indices))


@plan_rows.register_fake
def _(indices: Tensor) -> list[Tensor]:
    from pkm.memory.kernels import triton_rows

    return list(triton_rows.empty_plan(indices))


@torch.library.custom_op("pkm::read", mutates_args=())
def read(
    table: Tensor, indices: Tensor, weights: Tensor, plan: list[Tensor], dtype: torch.dtype, kernels: str
) -> Tensor:
    """Rows of table (K, d) summed with weights: indices, weights (N, J) -> (N, d) in `dtype`. Indices below 0 add nothing.

    Differentiable by weights, and by the table where it requires a gradient; else its receiver gets the rows'. `plan` is
    `plan_rows(indices)` for backward by Triton, else empty.
    """
    if kernels == "triton":
        from pkm.memory.kernels import triton_read

        return triton_read.read(table, indices, weights, dtype)
    return (cpu.read(table, indices, weights) if kernels == "torch" else reference.read(table, indices, weights)).to(
        dtype
    )


@read.register_fake
def _(table: Tensor, indices: Tensor, weights: Tensor, plan: list[Tensor], dtype: torch.dtype, kernels: str) -> Tensor:
    return table.new_empty(indices.shape[0], table.shape[1], dtype=dtype)


@torch.library.custom_op("pkm::read_backward", mutates_args=())
def read_backward(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, plan: list[Tensor], kernels: str, dense: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of `read` by its weights, (N, J) in their dtype, and with `dense` by the table, (K, d) in its dtype.

    Without, the rows' gradient goes to the `Values` that own the table; or it is applied at once, where they asked for the
    update inside backward.
    """
    dots, out = gradients(grad, table, indices, weights, plan, kernels, dense)
    assert dots is not None
    return dots.to(weights.dtype), out


@read_backward.register_fake
def _(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, plan: list[Tensor], kernels: str, dense: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), table.new_empty(table.shape if dense else (0, table.shape[1]))


def gradients(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, plan: list[Tensor], kernels: str, dense: bool,
    by_weights: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """What `read_backward` does, with the gradient by the weights or without; for other operators that read rows, too."""
    receiver = None if dense else next((r for r in RECEIVERS if r.weight.data_ptr() == table.data_ptr()), None)
    step = receiver.step_inside_backward() if receiver is not None else None
    out = torch.zeros_like(table) if dense else table.new_empty(0, table.shape[1])
    if kernels == "triton":
        from pkm.memory.kernels import triton_rows

        sorted_reads = triton_rows.Plan(*plan) if plan else triton_rows.plan(indices)
        total = receiver.row_sum() if receiver is not None and step is None else None
        wanted = out if dense else None
        return triton_rows.backward(sorted_reads, grad, table, weights, total, step, wanted, by_weights), out
    way = cpu if kernels == "torch" else reference
    dots = way.weight_gradient(grad, table, indices) if by_weights else None
    if dense or receiver is not None:
        rows, values = way.row_gradient(grad, indices, weights)
        if dense:
            out.index_copy_(0, rows, values.to(table.dtype))
        elif step is not None:
            adam_step.update(rows, values, table, step)
        elif receiver is not None:
            receiver.receive(rows, values)
    return dots, out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, indices, weights, plan, _, ctx.kernels = inputs
    ctx.save_for_backward(table, indices, weights, *plan)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    table, indices, weights, *plan = ctx.saved_tensors
    dense = ctx.needs_input_grad[0]
    by_weights, by_table = read_backward(grad, table, indices, weights, plan, ctx.kernels, dense)
    return by_table if dense else None, None, by_weights, [None] * len(plan), None, None


read.register_autograd(_backward, setup_context=_save)
