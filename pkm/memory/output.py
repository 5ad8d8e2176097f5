"""What becomes of what a memory read, before it joins the residual stream.

Shapes: N tokens, d model width, dv width of what was read: d, unless values have a width of their own.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.kinds import GATES, named
from pkm.config.schema import MemoryConfig
from pkm.memory.ngram import Scaled


class Output(Protocol):
    """A module."""

    def __call__(self, given: Tensor, x: Tensor) -> Tensor:
        """given (N, dv) what was read, x (N, d) the memory's input -> (N, d)."""


def build_output(config: MemoryConfig, dim: int) -> Output:
    """The output that `memory.gate` names (pkm.config.kinds)."""
    output: Output = named(GATES[config.gate].build)(config, dim)
    return output


def as_it_is(config: MemoryConfig, dim: int) -> AsItIs | Projection | Scaled:
    if config.keys == "ngram":
        return Scaled()
    if not config.is_projected:
        return AsItIs()
    width = config.given_width(dim)
    # N(0, 2 / 5d) in UltraMemV2, N(0, 1 / (E dv)) in UltraMem.
    return Projection(width, dim, (2 / (5 * dim) if config.read == "experts-linear" else 1 / width) ** 0.5)


def silu_gate(config: MemoryConfig, dim: int) -> SiluGate:
    return SiluGate(config.given_width(dim), dim)


class AsItIs(nn.Module):
    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        return given


class Projection(nn.Module):
    """A linear map without bias, (N, dv) -> (N, d); it begins as N(0, std^2)."""

    def __init__(self, width: int, dim: int, std: float):
        super().__init__()
        self.project = nn.Linear(width, dim, bias=False)
        nn.init.normal_(self.project.weight, std=std)

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.project(given)
        return y


class SiluGate(nn.Module):
    """W2 (y * silu(W1 x + b1)) + b2 of what was read y ("swilu": Memory Layers at Scale, 2024, section 3.2).

    Weights begin as N(0, 1 / d), biases as 0.
    """

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.gate, self.project = nn.Linear(dim, width), nn.Linear(width, dim)
        for linear in (self.gate, self.project):
            nn.init.normal_(linear.weight, std=dim**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.project(given * F.silu(self.gate(x)))
        return y
