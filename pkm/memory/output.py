"""What becomes of what a memory read, before it joins the residual stream.

Shapes: N tokens, d model width.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.kinds import GATES, named
from pkm.config.schema import MemoryConfig


class Output(Protocol):
    """A module."""

    def __call__(self, given: Tensor, x: Tensor) -> Tensor:
        """given (N, d) what was read, x (N, d) the memory's input -> (N, d)."""


def build_output(config: MemoryConfig, dim: int) -> Output:
    """The output that `memory.gate` names (pkm.config.kinds)."""
    output: Output = named(GATES[config.gate].build)(config, dim)
    return output


def as_it_is(config: MemoryConfig, dim: int) -> AsItIs:
    return AsItIs()


def silu_gate(config: MemoryConfig, dim: int) -> SiluGate:
    return SiluGate(dim)


class AsItIs(nn.Module):
    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        return given


class SiluGate(nn.Module):
    """W2 (y * silu(W1 x + b1)) + b2 of what was read y ("swilu": Memory Layers at Scale, 2024, section 3.2).

    Weights begin as N(0, 1 / d), biases as 0.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.gate, self.project = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for linear in (self.gate, self.project):
            nn.init.normal_(linear.weight, std=dim**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.project(given * F.silu(self.gate(x)))
        return y
