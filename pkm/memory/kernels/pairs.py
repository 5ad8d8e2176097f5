"""Which pairs of two sorted lists can be among the k best sums."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def candidate_pairs(k: int) -> list[tuple[int, int]]:
    """Positions (i, j), from 0, with (i + 1) * (j + 1) <= k, in lexicographic order.

    Every pair (i', j') with i' <= i and j' <= j comes before (i, j): with more than k of those it is not among the k best.
    """
    return [(i, j) for i in range(k) for j in range(k // (i + 1))]


@lru_cache(maxsize=64)
def pair_table(k: int, width: int, device: torch.device) -> Tensor:
    """The candidates as i * width + j, int32, filled up with -1 to a power of two."""
    pairs = [i * width + j for i, j in candidate_pairs(k)]
    size = max(1 << (len(pairs) - 1).bit_length(), width)
    return torch.tensor(pairs + [-1] * (size - len(pairs)), dtype=torch.int32, device=device)
