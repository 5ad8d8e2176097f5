"""What the slots that a token reads give it.

Shapes: N tokens, d model width, J reads of a token (heads * k).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pkm.config.kinds import READS, named
from pkm.config.schema import MemoryConfig
from pkm.memory.values import Values


class Read(Protocol):
    """A module. It may hold tables of its own besides the memory's `values`: they are `Values` too."""

    def __call__(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """x (N, d) the memory's input, indices and weights (N, J), an index below 0 reads nothing -> (N, d) in `dtype`."""


def build_read(config: MemoryConfig, dim: int, like: Read | None = None) -> Read:
    """The read that `memory.read` names (pkm.config.kinds); with the tables of `like`, a read of the same kind, if it is given."""
    tables = {} if like is None else dict(like.named_children())  # type: ignore[attr-defined]
    shared = {name: table for name, table in tables.items() if isinstance(table, Values)}
    read: Read = named(READS[config.read].build)(config, dim, **shared)
    return read


def rows(config: MemoryConfig, dim: int) -> Rows:
    return Rows()


class Rows(nn.Module):
    """The weighted sum of rows of the table (paper eq. 3)."""

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return values.read(indices, weights, dtype)
