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


UNITS = 2.0**32
"""Of a weight on a GPU: those of fp32 above 2^-8 are whole numbers of it, and 2^31 times all the weight of a head have room."""


class UsageMeter:
    """Adds up what a memory of K slots and H heads reads over a whole split, on a GPU where that is: nobody waits for it.

    weights  (K,): z', the sum of w(x)_i over tokens and heads (paper 4.2), without the sign that weights of Tucker keys may have. On a CPU float64; on a GPU, whose threads add up
             in any order, int64 in parts of 1 / UNITS, that the sum is the same in every run
    counts   (3,) int64: tokens seen; slots that two heads share, summed over tokens and pairs of heads; weights that are
             not finite
    recalls  (2,) float64: recalls of batches, summed, and how many there were
    """

    def __init__(self, slots: int, heads: int, device: torch.device | str = "cpu"):
        self.slots, self.heads = slots, heads
        on_gpu = torch.device(device).type == "cuda"
        self.weights = torch.zeros(
            slots, dtype=torch.int64 if on_gpu else torch.float64, device=device if on_gpu else "cpu"
        )
        self.counts = torch.zeros(3, dtype=torch.int64, device=self.weights.device)
        self.recalls = torch.zeros(2, dtype=torch.float64, device=self.weights.device)

    def update(
        self, indices: Tensor, weights: Tensor, counts: Tensor | None = None, recall: Tensor | None = None
    ) -> None:
        """indices (N, H, k) int32 or int64, weights (N, H, k): what N tokens read; counts (N,) bool: which of them to take."""
        here = self.weights.device
        if recall is not None:
            self.recalls += torch.stack([recall.detach().to(here).double(), torch.ones_like(self.recalls[0])])
        indices, weights = indices.detach().to(here).long(), weights.detach().to(here).double().abs()
        taken = torch.ones(len(indices), dtype=torch.bool, device=here) if counts is None else counts.to(here)
        indices, weights = (torch.where(taken.view(-1, 1, 1), t, 0) for t in (indices, weights))
        self.weights.index_add_(0, indices.flatten(), self._amounts(weights).flatten())
        # A slot that m heads select is m equal neighbours in sorted order: m * (m - 1) / 2 equal pairs, none further than H - 1 apart.
        together = indices.flatten(1).sort(-1).values
        shared = [(together[:, lag:] == together[:, :-lag]).sum(1) for lag in range(1, self.heads)]
        of_two = sum(shared, torch.zeros_like(taken, dtype=torch.int64)) * taken
        self.counts += torch.stack([taken.sum(), of_two.sum(), (~weights.isfinite()).sum()])

    def _amounts(self, weights: Tensor) -> Tensor:
        """What `weights` takes in; a weight above 0 stays above it."""
        exact = self.weights.dtype is torch.float64
        return weights if exact else torch.where(weights.isfinite(), (weights * UNITS).ceil(), 0.0).long()

    def sum_over_ranks(self) -> None:
        """Take in what every rank's meter counted; to be called once, on all ranks, before `result`."""
        dist.all_reduce(self.counts)
        dist.all_reduce(self.weights)
        dist.all_reduce(self.recalls)

    def result(self) -> Usage:
        """Usage of all tokens so far; ValueError if there were none, or their weights were not finite."""
        (tokens, shared, strange), recalls = self.counts.tolist(), self.recalls.tolist()
        weights = self.weights.cpu().double()
        total = weights.sum()
        if strange or total <= 0:
            raise ValueError(
                f"no usage to measure: the weights of {tokens} tokens sum to {total.item()}, {strange} of them no numbers"
            )
        z = (weights / total).sort().values
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
            shared_by_two_heads=shared / (tokens * pairs) if pairs else 0.0,
            recall=recalls[0] / recalls[1] if recalls[1] else None,
        )
