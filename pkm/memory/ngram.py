"""Addresses, gate and convolution of n-gram memories (Engram, 2026): rows are looked up by the last ids, and the hidden state
gates them.

Shapes: B windows, T tokens, N = B * T, n the longest order, J rows of a token (orders x heads), d model width, w width of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.schema import MemoryConfig
from pkm.memory.hashing import multipliers, sizes
from pkm.memory.values import Values


class Back(NamedTuple):
    """What n-gram memories know of the tokens before each token."""

    ids: Tensor
    """(B, T, n) int64, where it is looked up: its canonical id and those before it, nearest first (`looking_back`)."""
    reach: Tensor
    """(B or 1, T) int64, how many tokens before it are in its window and document."""
    past: dict[nn.Module, Tensor] | None = None
    """Of a window that is read bit by bit: what each convolution needs again of the tokens read so far."""


class NgramKeys(nn.Module):
    """Row of an order n and a head: ((c_t m_0) xor (c_{t-1} m_1) xor ... xor (c_{t-n+1} m_{n-1})) mod its prime.

    slots          of all heads and orders
    multipliers    (n,) int64, of this layer: known once the number of canonical ids is (`know`)
    """

    multipliers: Tensor

    def __init__(self, config: MemoryConfig, index: int, layer: int):
        """index    which of its section's memories it is, from 0; layer    counted from 1"""
        super().__init__()
        self.orders, self.heads, self.layer = config.orders, config.heads, layer
        self.sizes = sizes(config, index)
        self.slots = sum(self.sizes)
        self.register_buffer("multipliers", torch.ones(max(self.orders), dtype=torch.int64))

    def know(self, vocabulary: int) -> None:
        """How many canonical ids there are."""
        found = torch.from_numpy(multipliers(self.layer - 1, max(self.orders), vocabulary))
        self.multipliers.copy_(found)

    def select(self, back: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """back (N, n or more) int64, canonical ids of a token and those before it -> rows (N, J, 1) int64, weights of 1."""
        mixed, hashes = back[:, : len(self.multipliers)] * self.multipliers, []
        total = mixed[:, 0]
        for order in range(1, max(self.orders) + 1):
            if order > 1:
                total = total ^ mixed[:, order - 1]
            if order in self.orders:
                hashes += [total] * self.heads
        size = torch.tensor(self.sizes, device=back.device)
        found = torch.stack(hashes, 1) % size + (size.cumsum(0) - size)
        return found.unsqueeze(-1), torch.ones_like(found, dtype=torch.float32).unsqueeze(-1)


class SideBySide(nn.Module):
    """A token's rows as they are, one after the other: (N, J w)."""

    def forward(self, values: Values, x: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return values.read(indices.reshape(-1, 1), weights.reshape(-1, 1), dtype).view(len(x), -1)


class ContextGate(nn.Module):
    """a W_V e of what was read e, with a = sigmoid(rms(x) . rms(W_K e) / sqrt(d)): rows that do not fit the context are shut out."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.key, self.value = nn.Linear(width, dim, bias=False), nn.Linear(width, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def openness(self, given: Tensor, x: Tensor) -> Tensor:
        """a (N, 1), between 0 and 1, at least fp32."""
        x, k = (n(t.to(n.weight.dtype)) for n, t in zip(self.norms, (x, self.key(given)), strict=True))
        return torch.sigmoid((x * k).sum(-1, keepdim=True) * x.shape[-1] ** -0.5)

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        value = self.value(given)
        gated: Tensor = self.openness(given, x).to(value.dtype) * value
        return gated


class ShortConvolution(nn.Module):
    """y = u + silu(sum over i < w of c_i rms(u of i * dilation tokens before)) of what the gate gives u (Engram, 2026, section 3).

    weight    c (w, d), nearest first: every number of the width has its own. It begins as 0, with which y = u
    """

    def __init__(self, dim: int, width: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.weight = nn.Parameter(torch.zeros(width, dim))

    def forward(self, u: Tensor, back: Back) -> Tensor:
        """u (B, T, d) -> (B, T, d); of another document, and before the window, nothing is seen."""
        normalised = self.norm(u.to(self.norm.weight.dtype)).to(u.dtype)
        farthest = (len(self.weight) - 1) * self.dilation
        before = None if back.past is None else back.past.get(self)
        seen = F.pad(normalised, (0, 0, farthest, 0)) if before is None else torch.cat([before, normalised], 1)
        if back.past is not None:
            back.past[self] = seen[:, u.shape[1] :]
        own, *others = self.weight.to(u.dtype)
        mixed = own * seen[:, farthest:]
        for i, weight in enumerate(others, start=1):
            tap = seen[:, farthest - i * self.dilation :][:, : u.shape[1]]
            mixed = mixed + (weight * tap).masked_fill((back.reach < i * self.dilation).unsqueeze(-1), 0)
        return u + F.silu(mixed)


class Scaled(nn.Module):
    """What was read, times a number that is learnt and begins as 0.1: the table itself begins as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.1]))

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        return given * self.scale.to(given.dtype)


def looking_back(ids: Tensor, longest: int, padding: Tensor, before: Tensor | None, documents: Tensor | None) -> Tensor:
    """Canonical ids (B, T) -> (B, T, longest): of each token its own, and those of the tokens before it, nearest first.

    before       (B, longest - 1), what stands before ids; None = nothing, which is `padding`
    documents    (B, T): nothing of another document is seen
    """
    if before is None:
        before = padding.expand(len(ids), longest - 1)
    back = torch.cat([before, ids], 1).unfold(1, longest, 1).flip(-1)
    if documents is not None:
        own = torch.cat([documents[:, :1].expand(-1, longest - 1), documents], 1).unfold(1, longest, 1).flip(-1)
        back = torch.where(own == documents.unsqueeze(-1), back, padding)
    return back


def ngram_keys(config: MemoryConfig, index: int, layer: int) -> NgramKeys:
    return NgramKeys(config, index, layer)


def context_gate(config: MemoryConfig, dim: int) -> ContextGate:
    return ContextGate(config.given_width(dim), dim)
