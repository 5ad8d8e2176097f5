"""Key sets: which slots a query reads, and with what score (paper 3.1, "Standard key assignment" and "The product key set").

Shapes: N tokens, H heads, K slots, C sub-keys a side (K = C * C), q query size, k selected slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pkm.memory.kernels import reference


class ProductKeys(nn.Module):
    """Two sets of C sub-keys for each head; slot i * C + j has the key (sub-key i of the first, sub-key j of the second)."""

    def __init__(self, heads: int, sub_keys: int, dim: int):
        super().__init__()
        self.heads, self.sub_keys, self.slots = heads, sub_keys, sub_keys**2
        bound = (dim // 2) ** -0.5
        self.weight = nn.Parameter(torch.empty(heads, 2, sub_keys, dim // 2).uniform_(-bound, bound))

    def scores(self, query: Tensor) -> Tensor:
        """query (N, H, q) -> inner products of its halves with the sub-keys (N, H, 2, C), at least fp32."""
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            halves = query.to(dtype).unflatten(-1, (2, -1))
            return torch.einsum("nhsq,hscq->nhsc", halves, self.weight.to(dtype))

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k) int64 and their scores (N, H, k), best first."""
        return reference.select_product(self.scores(query), k)


class FlatKeys(nn.Module):
    """One key a slot, for each head its own."""

    def __init__(self, heads: int, slots: int, dim: int):
        super().__init__()
        self.heads, self.slots = heads, slots
        bound = dim**-0.5
        self.weight = nn.Parameter(torch.empty(heads, slots, dim).uniform_(-bound, bound))

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k) int64 and their scores (N, H, k), best first."""
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            return reference.select_flat(query.to(dtype), self.weight.to(dtype), k)
