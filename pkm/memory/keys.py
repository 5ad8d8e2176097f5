"""Key sets: which slots a query reads, and with what score (paper 3.1, "Standard key assignment" and "The product key set").

Shapes: N tokens, H heads, K slots, C sub-keys a side (K = C * C), q query size, k selected slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pkm.memory.kernels import flat_search_op, reference, search_op


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

    def select(
        self, query: Tensor, scale: Tensor | None, shift: Tensor | None, k: int, kernels: str
    ) -> tuple[Tensor, Tensor]:
        """`search` with query * scale + shift for a query, and softmax: slots (N, H, k) int32, weights (N, H, k). Fast."""
        with torch.autocast(query.device.type, enabled=False):
            keys, bias = fold(self.weight, scale, shift, (self.heads, 2, 1, -1))
            return search_op.search(query, keys.to(query.dtype), bias, k, kernels)

    def search_faiss(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`search` with faiss for the nearest sub-keys; which of equal sub-keys it takes is faiss' choice."""
        from pkm.memory.kernels.faiss_search import nearest

        halves = query.unflatten(-1, (2, -1))
        first, second = (
            torch.stack([nearest(halves[:, h, side], self.weight[h, side], k) for h in range(self.heads)], dim=1)
            for side in (0, 1)
        )
        return reference.select_among(self.scores(query), first, second)


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

    def select(
        self, query: Tensor, scale: Tensor | None, shift: Tensor | None, k: int, kernels: str
    ) -> tuple[Tensor, Tensor]:
        """`search` with query * scale + shift for a query, and softmax: slots (N, H, k) int32, weights (N, H, k). Fast."""
        with torch.autocast(query.device.type, enabled=False):
            keys, bias = fold(self.weight, scale, shift, (self.heads, 1, -1))
            return flat_search_op.search_flat(query, keys.to(query.dtype), bias, k, kernels)

    def search_faiss(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`search` with faiss for the nearest keys; which of equal keys it takes, and their order, is faiss' choice."""
        from pkm.memory.kernels.faiss_search import nearest

        slots = torch.stack([nearest(query[:, h], self.weight[h], k) for h in range(self.heads)], dim=1)
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            heads = torch.arange(self.heads, device=query.device).view(-1, 1)
            return slots, torch.einsum("nhq,nhkq->nhk", query.to(dtype), self.weight[heads, slots].to(dtype))


def fold(weight: Tensor, scale: Tensor | None, shift: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys (..., C, q) and bias (..., C): key . (query * scale + shift) = (key * scale) . query + key . shift."""
    if scale is None or shift is None:
        return weight, weight.new_zeros(weight.shape[:-1])
    return weight * scale.view(shape), (weight * shift.view(shape)).sum(-1)
