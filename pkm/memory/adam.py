"""Lazy Adam for tables of values (Kingma & Ba, 2014; paper 4.4 "sparse updates").

A row that was not read in a step does not move, and neither do its moments. Bias correction uses the global step, not the
number of times a row was read, as torch's SparseAdam does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pkm.config import ValuesOptim
from pkm.memory.values import Values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16+master": torch.bfloat16}


class ValuesAdam:
    """The values' optimizer: takes the tables over (their `weight` no longer gets a `.grad`).

    step t on a row with gradient g:  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
    row <- row - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(self, tables: list[Values], settings: ValuesOptim):
        self.tables, self.settings = tables, settings
        self.moments: list[tuple[Tensor, Tensor]] = []
        for table in tables:
            table.collect_rows()
            self.moments.append((torch.zeros_like(table.weight), torch.zeros_like(table.weight)))

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of all tables' gradients, fp32 scalar."""
        found = [g.values for table in self.tables if (g := table.gradient()) is not None]
        return torch.nn.utils.get_total_norm(found) if found else torch.zeros(())

    def scale_gradients(self, factor: float | Tensor) -> None:
        for table in self.tables:
            gradient = table.gradient()
            if gradient is not None:
                gradient.values.mul_(factor)

    @torch.no_grad()
    def step(self, lr: float, step: int) -> None:
        """Update the rows that were read; `step` counts from 1."""
        b1, b2 = self.settings.betas
        for table, (mean, square) in zip(self.tables, self.moments, strict=True):
            gradient = table.gradient()
            if gradient is None:
                continue
            rows, g = gradient
            m = mean[rows].lerp_(g, 1 - b1)
            v = square[rows].mul_(b2).addcmul_(g, g, value=1 - b2)
            mean[rows], square[rows] = m, v
            move = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt_() + self.settings.eps)
            table.weight[rows] -= lr * move

    def clear(self) -> None:
        for table in self.tables:
            table.clear_gradient()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by name, `<table>.mean` and `<table>.square`; the tensors themselves, not copies."""
        return {
            f"{i}.{name}": t
            for i, pair in enumerate(self.moments)
            for name, t in zip(("mean", "square"), pair, strict=True)
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy moments in place; ValueError if one is missing, left over, or has another shape or dtype."""
        own = self.state_tensors()
        if own.keys() != tensors.keys():
            raise ValueError(f"expected {sorted(own)}, found {sorted(tensors)}")
        for name, tensor in own.items():
            found = tensors[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise ValueError(
                    f"{name}: expected {tuple(tensor.shape)} {tensor.dtype}, found {tuple(found.shape)} {found.dtype}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
