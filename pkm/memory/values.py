"""The table of values: one row a slot, shared by all heads (paper 3.1, eq. 3), and the gradient of the rows that were read.

Shapes: K slots, d model width, N tokens, J reads of a token (heads * k), U distinct rows read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pkm.memory.kernels import read_op
from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.kernels.backend import REFERENCE, Backend
from pkm.memory.kernels.row_sum import RowSum


class RowGradient(NamedTuple):
    """Gradient of the rows that were read, and of no others."""

    rows: Tensor
    """(U,) int64, ascending, each row once."""
    values: Tensor
    """(U, d) fp32."""


class CollectedTable(nn.Parameter):
    """The weight of a table that collects rows: to autograd, and to DistributedDataParallel, it requires no gradient.

    So what whoever owns the model sets `requires_grad` to, on it or on a module around it, is kept in `frozen`.
    """

    frozen = False

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, trains: bool) -> None:
        self.frozen = not trains

    def requires_grad_(self, requires_grad: bool = True) -> CollectedTable:
        self.frozen = not requires_grad
        return self


class Values(nn.Module):
    """A table (K, d), initialised N(0, std^2) with std = d^-1/2 where none is given.

    dense        (as built) `weight` is an ordinary parameter: backward leaves a K x d gradient in `weight.grad`
    sparse       after `.collect_rows()`: `weight` has no `.grad`; backward leaves the compact gradient of the rows that
                 were read in `.gradient()`, summed over backward passes until `.clear_gradient()`
    in_backward  while `inside_backward` is set: backward asks it for an update and applies that to the rows; no gradient
                 is left
    frozen       while `requires_grad` of `weight` is set to False, also then: no gradient is left and no row moves

    backend       who reads
    read_sharded  if set, `weight` is this rank's columns only, and this reads from all of them (pkm.memory.sharding);
                  `dots_sharded` multiplies with all of them
    """

    def __init__(self, slots: int, dim: int, std: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(slots, dim).normal_(std=dim**-0.5 if std is None else std))
        self.backend: Backend = REFERENCE
        self.read_sharded: Callable[[Values, Tensor, Tensor, torch.dtype], Tensor] | None = None
        self.dots_sharded: Callable[[Values, Tensor, Tensor], Tensor] | None = None
        self.collects = False
        self.first_column = 0  # of the whole table, where this is a rank's part of it
        self.inside_backward: Callable[[], AdamStep] | None = None
        self._gradient: RowGradient | None = None
        self._sum: RowSum | None = None  # of Triton's backward, in its place

    @property
    def sharded(self) -> bool:
        """Whether `weight` is this rank's columns only."""
        return self.read_sharded is not None

    @property
    def frozen(self) -> bool:
        """Whether no row is to move."""
        return getattr(self.weight, "frozen", not (self.collects or self.weight.requires_grad))

    def collect_rows(self) -> None:
        """From now on keep compact gradients of the rows that were read instead of `weight.grad`."""
        if not isinstance(self.weight, CollectedTable):
            self.weight.requires_grad_(False)
            self.weight.__class__ = CollectedTable
        self.weight.grad = None
        self.collects = True
        read_op.RECEIVERS.add(self)

    def read(self, indices: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Weighted sum of rows: indices (N, J) int32 or int64, weights (N, J) -> (N, d) in `dtype`, by default the table's.

        An index below 0 reads nothing, leaves no gradient and touches no row.
        """
        if self.read_sharded is not None:
            return self.read_sharded(self, indices, weights, dtype or self.weight.dtype)
        return self.read_columns(indices, weights, dtype)

    def read_columns(self, indices: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `read`, of the columns that this rank holds."""
        if self.collects and torch.is_grad_enabled() and not weights.requires_grad:
            # Backward must pass here for the rows' sake even where nothing before needs a gradient.
            weights = weights.detach().requires_grad_()
        return self.backend.read(self.weight, indices, weights, dtype or self.weight.dtype)

    def dots(self, x: Tensor, indices: Tensor) -> Tensor:
        """Products of tokens with rows: x (N, d), indices (N, J) int32 or int64 -> (N, J), at least fp32; 0 for an index below 0."""
        return self.dots_columns(x, indices) if self.dots_sharded is None else self.dots_sharded(self, x, indices)

    def dots_columns(self, x: Tensor, indices: Tensor) -> Tensor:
        """As `dots`, of the columns that this rank holds, and x (N, d / R) too."""
        if self.collects and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # as in `read_columns`
        return self.backend.dots(x, self.weight, indices)

    def gradient(self) -> RowGradient | None:
        """Sum over all backward passes since `.clear_gradient()`; None if no row was read, or none is to move.

        Waits for a GPU whose kernels added it up, and copies it: those who can take it as it is ask `summed`.
        """
        if self.frozen:
            return None
        found = None if self._sum is None or not self._sum.reads else self._sum.sorted()
        return self._gradient if found is None else RowGradient(*found)

    def summed(self) -> RowSum | None:
        """The gradient as Triton's kernels added it up; None if there is none, or it is somebody else's."""
        return self._sum if self._sum is not None and self._sum.reads and not self.frozen else None

    def set_gradient(self, gradient: RowGradient | None) -> None:
        """Put another in its place, for instance the sum over ranks."""
        self.clear_gradient()
        self._gradient = gradient

    def clear_gradient(self) -> None:
        self._gradient = None
        if self._sum is not None:
            self._sum.clear()

    def row_sum(self) -> RowSum:
        """What Triton's backward adds the gradient of one pass to; kept from step to step, it is as large as they need."""
        if self._sum is None or self._sum.places.device != self.weight.device:
            self._sum = RowSum(self.weight)
        return self._sum

    def receive(self, rows: Tensor, values: Tensor) -> None:
        """Add the gradient of one backward pass: rows (U,) ascending and distinct, values (U, d)."""
        if len(rows) and not self.frozen:
            new = RowGradient(rows, values)
            self._gradient = new if self._gradient is None else add_rows(self._gradient, new)

    def step_inside_backward(self) -> AdamStep | None:
        """The update that backward is to apply, if it is to."""
        return self.inside_backward() if self.inside_backward is not None and not self.frozen else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or what is unpickled, begins as a parameter's does: without a gradient. The optimizer is the original's.
        without = {"_gradient": None, "_sum": None, "inside_backward": None}
        return {**super().__getstate__(), **without, "trains": not self.frozen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: part for name, part in state.items() if name != "trains"})
        if self.collects:
            self.collect_rows()
            self.weight.requires_grad_(state.get("trains", True))


def borrow(module: nn.Module, name: str, table: Values) -> None:
    """Let `module` read a table that is another's part: found by its name, but no part of it.

    So a model has every table once: as a parameter, in checkpoints, and when it is moved.
    """
    object.__setattr__(module, name, table)


def tables(model: nn.Module) -> dict[str, Values]:
    """Every table in `model` by its name there, once, however many layers read it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Values)}


def add_rows(a: RowGradient, b: RowGradient) -> RowGradient:
    """Sum of two compact gradients; the same bits on every run, since each row takes part once in each addition."""
    rows = torch.cat([a.rows, b.rows]).unique()
    values = torch.zeros(len(rows), a.values.shape[1], dtype=a.values.dtype, device=a.values.device)
    for part in (a, b):
        values.index_add_(0, torch.searchsorted(rows, part.rows), part.values)
    return RowGradient(rows, values)
