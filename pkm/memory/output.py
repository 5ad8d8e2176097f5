"""What becomes of what a memory read, before it joins the residual stream.

Shapes: N tokens, d model width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from pkm.config.schema import MemoryConfig


class Output(Protocol):
    """A module."""

    def __call__(self, given: Tensor, x: Tensor) -> Tensor:
        """given (N, d) what was read, x (N, d) the memory's input -> (N, d)."""


def build_output(config: MemoryConfig, dim: int) -> Output:
    """As it is: the only kind so far."""
    return AsItIs()


class AsItIs(nn.Module):
    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        return given
