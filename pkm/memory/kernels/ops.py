"""The read of a table and its gradients as torch operators, so that compilers see one node and autograd the right thing.

A table whose rows move sparsely has no K x d gradient. Its operator hands the compact gradient of the rows that were read
to the table itself, which backward finds by `ticket` (an operator takes tensors and numbers, no objects).
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pkm.memory.kernels import reference


class Receiver(Protocol):
    """A table as backward sees it."""

    def receive(self, rows: Tensor, values: Tensor) -> None: ...


RECEIVERS: WeakValueDictionary[int, Receiver] = WeakValueDictionary()


@torch.library.custom_op("pkm::read", mutates_args=())
def read(table: Tensor, indices: Tensor, weights: Tensor, ticket: int, dtype: torch.dtype) -> Tensor:
    """Rows of table (K, d) summed with weights: indices, weights (N, J) -> (N, d) in `dtype`. Indices below 0 add nothing.

    Differentiable by weights, and by the table where it requires a gradient; else its receiver gets the rows'.
    """
    return reference.read(table, indices, weights).to(dtype)


@read.register_fake
def _(table: Tensor, indices: Tensor, weights: Tensor, ticket: int, dtype: torch.dtype) -> Tensor:
    return table.new_empty(indices.shape[0], table.shape[1], dtype=dtype)


@torch.library.custom_op("pkm::read_backward", mutates_args=())
def read_backward(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, ticket: int) -> Tensor:
    """Gradient of `read` by its weights, (N, J) in their dtype. The receiver of `ticket` gets the gradient of the rows."""
    receiver = RECEIVERS.get(ticket)
    dots = reference.weight_gradient(grad, table, indices).to(weights.dtype)
    if receiver is not None:
        receiver.receive(*reference.row_gradient(grad, indices, weights))
    return dots


@read_backward.register_fake
def _(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, ticket: int) -> Tensor:
    return torch.empty_like(weights)


@torch.library.custom_op("pkm::read_table_gradient", mutates_args=())
def read_table_gradient(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Gradient of `read` by the whole table, (K, d) in its dtype."""
    rows, values = reference.row_gradient(grad, indices, weights)
    return torch.zeros_like(table).index_copy_(0, rows, values.to(table.dtype))


@read_table_gradient.register_fake
def _(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, indices, weights, ctx.ticket, _ = inputs
    ctx.save_for_backward(table, indices, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    table, indices, weights = ctx.saved_tensors
    by_table = read_table_gradient(grad, table, indices, weights) if ctx.needs_input_grad[0] else None
    return by_table, None, read_backward(grad, table, indices, weights, ctx.ticket), None, None


read.register_autograd(_backward, setup_context=_save)
