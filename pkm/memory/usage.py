"""How much of a memory is used, and how evenly (paper 4.2, "Evaluation metrics")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pkm.distributed import dist


@dataclass(frozen=True)
class Usage:
    """Measures of z, the share of all weights that each slot got (z sums to 1), and of the heads' agreement."""

    percent: float
    """Memory usage: slots with z != 0, % of all."""
    kl: float
    """KL(z || uniform) = log K + sum z log z, nats."""
    gini: float
    """Gini coefficient of z: 0 = all slots alike, towards 1 = one slot takes all."""
    top50: float
    """Fewest slots that together have 50 % of the weights, % of all slots."""
    top90: float
    """The same for 90 %."""
    top99: float
    """The same for 99 %."""
    shared_by_two_heads: float
    """Slots that a pair of heads both select for a token: mean over tokens and pairs; 0 for one head."""
    recall: float | None = None
    """Of a search that is not exact, the share of each head's best slots that it finds; None of one that is."""


class UsageMeter:
    """Adds up what a memory of K slots and H heads reads over a whole split, in float64 on the CPU.

    weights  (K,) float64: z', the sum of w(x)_i over tokens and heads (paper 4.2), without the sign that weights of Tucker keys may have
    tokens   tokens seen
    shared   slots that two heads share, summed over tokens and pairs of heads
    recalls  recalls of batches, summed, and how many there were
    """

    def __init__(self, slots: int, heads: int):
        self.slots, self.heads = slots, heads
        self.weights = torch.zeros(slots, dtype=torch.float64)
        self.tokens = 0
        self.shared = 0
        self.recalls = 0.0, 0

    def update(
        self, indices: Tensor, weights: Tensor, counts: Tensor | None = None, recall: Tensor | None = None
    ) -> None:
        """indices (N, H, k) int32 or int64, weights (N, H, k): what N tokens read; counts (N,) bool: which of them to take."""
        if recall is not None:
            self.recalls = self.recalls[0] + float(recall), self.recalls[1] + 1
        if counts is not None:
            indices, weights = indices[counts], weights[counts]
        indices = indices.detach().cpu().long()
        self.weights.index_add_(0, indices.flatten(), weights.detach().cpu().double().abs().flatten())
        self.tokens += indices.shape[0]
        # A slot that m heads select is m equal neighbours in sorted order: m * (m - 1) / 2 equal pairs, none further than H - 1 apart.
        together = indices.flatten(1).sort(-1).values
        self.shared += sum(int((together[:, lag:] == together[:, :-lag]).sum()) for lag in range(1, self.heads))

    def sum_over_ranks(self) -> None:
        """Take in what every rank's meter counted; to be called once, on all ranks, before `result`."""
        counts = dist.all_reduce(torch.tensor([self.tokens, self.shared, *self.recalls], dtype=torch.float64))
        self.tokens, self.shared = int(counts[0]), int(counts[1])
        self.recalls = float(counts[2]), int(counts[3])
        self.weights = dist.all_reduce(self.weights)

    def result(self) -> Usage:
        """Usage of all tokens so far; ValueError if there were none, or their weights were not finite."""
        total = self.weights.sum()
        if not torch.isfinite(total) or total <= 0:
            raise ValueError(f"no usage to measure: the weights of {self.tokens} tokens sum to {total.item()}")
        z = (self.weights / total).sort().values
        slots = self.slots
        nonzero = z[z > 0]
        ranks = torch.arange(1, slots + 1, dtype=torch.float64)
        coverage = z.flip(0).cumsum(0)
        # The smallest n with coverage[n - 1] >= share; the last sum may fall short of 1 by rounding, never of 0.99.
        top = [100.0 * (int((coverage < share).sum()) + 1) / slots for share in (0.5, 0.9, 0.99)]
        pairs = self.heads * (self.heads - 1) / 2
        return Usage(
            percent=100.0 * len(nonzero) / slots,
            kl=float(torch.log(torch.tensor(slots, dtype=torch.float64)) + (nonzero * nonzero.log()).sum()),
            gini=float(((2 * ranks - slots - 1) * z).sum() / slots),
            top50=top[0],
            top90=top[1],
            top99=top[2],
            shared_by_two_heads=self.shared / (self.tokens * pairs) if pairs else 0.0,
            recall=self.recalls[0] / self.recalls[1] if self.recalls[1] else None,
        )
