"""Reads of more slots than there are rows (UltraMem, 2024, "implicit value expansion"), and by several cores' weights.

Shapes: N tokens, d model width, J reads of a token, K rows of a table, E expansion, P cores, dv value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pkm.config.schema import MemoryConfig
from pkm.memory.values import Values, borrow


def shuffled(slots: Tensor, rows: int, expansion: int) -> tuple[Tensor, Tensor]:
    """Of each of E * K virtual slots the block, 0 to E - 1, and the row, 0 to K - 1, that a fixed permutation gives it; without
    expansion each slot is its row.

    The permutation is s -> a s mod E K with a near the golden section of E K: neighbours come far apart, and nothing is stored.
    """
    if expansion == 1:
        return torch.zeros_like(slots), slots
    place = slots.long() * _step(rows * expansion) % (rows * expansion)
    block = place // rows
    return block, place - block * rows


def shuffled_row(slots: Tensor, rows: int, expansion: int) -> Tensor:
    """The row alone: integers are slow to divide."""
    return slots if expansion == 1 else slots.long() * _step(rows * expansion) % rows


def _step(total: int) -> int:
    step = max(1, round(total * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, total) != 1:
        step += 1
    return step


class VirtualRows(nn.Module):
    """E weighted sums of rows, each of the slots of one block, side by side: (N, E * dv). Its output projects them.

    Of several cores each weighs columns of its own: the table holds a slot's as P rows of dv / P (UltraMem, "multi-core
    scoring").
    """

    def __init__(self, config: MemoryConfig):
        super().__init__()
        self.rows, self.expansion, self.cores = config.size, config.expansion, config.cores

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """indices (N, J) of virtual slots, weights (N, J), or (N, J, P)."""
        reads, cores = indices.shape[1], self.cores
        block, row = shuffled(indices, self.rows, self.expansion)
        blocks = torch.arange(self.expansion, device=indices.device)
        here = (block.unsqueeze(1) == blocks.view(1, -1, 1)) & (indices >= 0).unsqueeze(1)
        row = torch.where(here, row.unsqueeze(1), -1).unsqueeze(2)  # (N, E, 1, J)
        each = torch.arange(cores, device=indices.device).view(1, 1, -1, 1)
        row = torch.where(row >= 0, row * cores + each, -1).to(torch.int32)
        weights = weights.view(-1, 1, reads, cores).transpose(2, 3).expand(row.shape)
        return values.read(row.reshape(-1, reads), weights.reshape(-1, reads), dtype).view(len(x), -1)


class LinearExperts(nn.Module):
    """Each slot a linear expert: the weighted sum of (u_i . P x) v_i, u a table of its own, v the values (UltraMemV2, 2025).

    A row is behind E slots; a weight is the sum of all cores' parts.
    """

    down: Values

    def __init__(self, config: MemoryConfig, dim: int, down: Values | None = None):
        """down    the table u, if it is another memory's too"""
        super().__init__()
        self.rows, self.expansion = config.size, config.expansion
        self.project = nn.Linear(dim, config.input_width(dim), bias=False)
        nn.init.normal_(self.project.weight, std=(2 / (5 * dim)) ** 0.5)
        if down is None:
            self.down = Values(config.size, config.input_width(dim), config.values_std)
        else:
            borrow(self, "down", down)

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """indices (N, J) of virtual slots, weights (N, J), or (N, J, P) -> (N, Dv)."""
        row = torch.where(indices >= 0, shuffled_row(indices, self.rows, self.expansion), -1).to(torch.int32)
        weights = weights.sum(-1) if weights.ndim == 3 else weights
        return values.read(row, weights * self.down.dots(self.project(x), row), dtype)
