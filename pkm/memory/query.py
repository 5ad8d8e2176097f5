"""The query network: x -> one query per head, normalised (paper 3.1, "Query generation").

Shapes: N tokens, d model width, H heads, q query size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.schema import QueryConfig
from pkm.memory.kernels import statistics
from pkm.memory.kernels.backend import REFERENCE, Backend


class Query(NamedTuple):
    """Queries of N tokens, before an affine map that the keys can take in instead: they are fewer than queries."""

    raw: Tensor
    """(N, H, q)."""
    scale: Tensor | None
    """(H, q): the query is raw * scale + shift, or raw where both are None."""
    shift: Tensor | None
    dtype: torch.dtype
    """In which fast kernels multiply them with keys."""

    def whole(self) -> Tensor:
        """(N, H, q), normalised."""
        return self.raw if self.scale is None or self.shift is None else self.raw * self.scale + self.shift


class BatchNorm(nn.Module):
    """Batch normalisation over the tokens, each of F features apart (Ioffe & Szegedy, 2015), in fp32 at least.

    Unlike `nn.BatchNorm1d` it takes a mask, so that padding never enters a statistic; it does not count a batch twice
    that activation checkpointing computes twice; and it hands out its affine map, which folds into what reads it.
    Training statistics see every token of the (micro-)batch, later ones included; evaluation uses the running
    statistics and is causal.

    momentum        weight of the newest batch in the running statistics
    backend         who computes statistics
    sum_over_ranks  if set: differentiable sum of a tensor over all ranks, for statistics of the whole batch
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.backend: Backend = REFERENCE
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def affine(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (N, F), mask (N,) bool, True = counts -> scale, shift (F,): the normalised x is x * scale + shift."""
        if self.training:
            mean, var, count = self._batch_statistics(x, mask)
            statistics.update_running(
                self.running_mean, self.running_var, mean.detach(), var.detach(), count, self.momentum
            )
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        return scale, self.bias - mean * scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, F) -> (N, F), at least fp32."""
        scale, shift = self.affine(x, mask)
        return x * scale + shift

    def _batch_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and (biased) variance of each feature and the number of tokens they are over."""
        mean, var, count = self.backend.column_statistics(x, mask)
        if self.sum_over_ranks is None:
            return mean, var, count
        # Chan et al.: the parts' means and variances give the whole's without a second pass over x.
        total = self.sum_over_ranks(count).clamp(min=1)
        whole = self.sum_over_ranks(count * mean) / total
        return whole, self.sum_over_ranks(count * (var + (mean - whole).square())) / total, total


class QueryNetwork(nn.Module):
    """x (N, d) -> queries (N, H, q): linear, or a ReLU network whose hidden layers each head has for itself.

    Parameters: sizes d -> hidden... -> q give each head sum(a * b + b) over neighbouring sizes (a, b); the norm adds
    2 * H * q (batch: all heads' features; layer: each head's q features or each half of them), rms H * q.
    """

    def __init__(self, config: QueryConfig, dim: int, heads: int):
        super().__init__()
        self.heads, self.dim = heads, config.dim
        sizes = [*config.hidden, config.dim]
        self.first = nn.Linear(dim, heads * sizes[0])
        self.deeper = nn.ModuleList(HeadsLinear(heads, a, b) for a, b in pairwise(sizes))
        self.norm: BatchNorm | HeadsLayerNorm | HeadsRMSNorm | None = None
        if config.norm == "batch":
            self.norm = BatchNorm(heads * config.dim)
        elif config.norm == "rms":
            self.norm = HeadsRMSNorm(heads, config.dim)
        elif config.norm != "none":
            halves = 2 if config.norm == "layer_halves" else 1
            self.norm = HeadsLayerNorm(heads * halves, config.dim // halves)

    def raw(self, x: Tensor) -> Tensor:
        """Queries before normalisation, (N, H * q)."""
        h = self.first(x)
        for layer in self.deeper:
            h = layer(F.relu(h))
        return h

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Query:
        """x (N, d), mask (N,) bool or None, True for tokens that are not padding."""
        h = self.raw(x)
        scale = shift = None
        if isinstance(self.norm, BatchNorm):
            scale, shift = (t.unflatten(0, (self.heads, self.dim)) for t in self.norm.affine(h, mask))
        elif self.norm is not None:
            h = self.norm(h)
        return Query(h.unflatten(-1, (self.heads, self.dim)), scale, shift, compute_dtype(x))


class HeadsLinear(nn.Module):
    """A linear map of its own for each head: (N, H * a) -> (N, H * b); initialised as nn.Linear is."""

    def __init__(self, heads: int, inputs: int, outputs: int):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        heads, inputs, _ = self.weight.shape
        return (x.unflatten(-1, (heads, inputs)).transpose(0, 1) @ self.weight + self.bias).transpose(0, 1).flatten(1)


class HeadsLayerNorm(nn.Module):
    """Layer normalisation over each head's q features, with a weight and bias for every feature: (N, H * q) -> the same.

    Half a query may stand for a head.
    """

    def __init__(self, heads: int, dim: int, eps: float = 1e-5):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.ones(heads * dim))
        self.bias = nn.Parameter(torch.zeros(heads * dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1))
        x = F.layer_norm(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, x.shape[-1:], eps=self.eps)
        return x.flatten(-2) * self.weight + self.bias


class HeadsRMSNorm(nn.Module):
    """Each head's q features over their root mean square, with a weight for every feature: (N, H * q) -> the same."""

    def __init__(self, heads: int, dim: int, eps: float = 1e-6):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.ones(heads * dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1))
        x = F.rms_norm(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, x.shape[-1:], eps=self.eps)
        return x.flatten(-2) * self.weight


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
