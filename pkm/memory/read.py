"""What the slots that a token reads give it.

Shapes: N tokens, d model width, J reads of a token (heads * k).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.kinds import READS, named
from pkm.config.schema import MemoryConfig
from pkm.memory.ngram import SideBySide
from pkm.memory.values import Values, borrow
from pkm.memory.virtual import LinearExperts, VirtualRows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class Read(Protocol):
    """A module. It may hold tables of its own besides the memory's `values`: they are `Values` too."""

    def __call__(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """x (N, d) the memory's input, indices and weights (N, J), an index below 0 reads nothing -> (N, d) in `dtype`.

        Where keys have several cores, weights (N, J, cores); where values have a width of their own, that instead of d.
        """


def build_read(config: MemoryConfig, dim: int, like: Read | None = None) -> Read:
    """The read that `memory.read` names (pkm.config.kinds); with the tables of `like`, a read of the same kind, if it is given."""
    tables = {} if like is None else dict(like.named_children())  # type: ignore[attr-defined]
    shared = {name: table for name, table in tables.items() if isinstance(table, Values)}
    read: Read = named(READS[config.read].build)(config, dim, **shared)
    return read


def rows(config: MemoryConfig, dim: int) -> Rows | VirtualRows | SideBySide:
    if config.keys == "ngram" and config.gate == "engram":
        return SideBySide()
    return VirtualRows(config) if config.expansion > 1 or config.cores > 1 else Rows()


def experts(config: MemoryConfig, dim: int, down: Values | None = None) -> Experts:
    return Experts(config, dim, down)


def linear_experts(config: MemoryConfig, dim: int, down: Values | None = None) -> LinearExperts:
    return LinearExperts(config, dim, down)


class Rows(nn.Module):
    """The weighted sum of rows of the table (paper eq. 3)."""

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return values.read(indices, weights, dtype)


class Experts(nn.Module):
    """Each slot a network of one hidden unit: the weighted sum of act(u_i . x) v_i, u a table of its own, v the memory's values
    (PEER: He, 2024, eq. 1-3)."""

    down: Values

    def __init__(self, config: MemoryConfig, dim: int, down: Values | None = None):
        """down    the table u, if it is another memory's too"""
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        if down is None:
            self.down = Values(config.size, dim, config.values_std)
        else:
            borrow(self, "down", down)

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return values.read(indices, weights * self.activation(self.down.dots(x, indices)), dtype)
