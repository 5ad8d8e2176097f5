"""Keys whose grid of scores is a Tucker decomposition (UltraMem, 2024, section 3.2, "TDQKR"), and how such memories begin.

Shapes: N tokens, H heads, C' sub-keys a side, r rank, P cores, q size of a side's query, m slots a head reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.schema import MemoryConfig
from pkm.errors import UserError
from pkm.memory.kernels import reference
from pkm.memory.kernels.backend import REFERENCE, Backend
from pkm.memory.query import Query

MONTE_CARLO_TOKENS = 64
TAU = 0.15
"""What a singular value may be without a loss, as in UltraMem."""
RECALL_TOKENS = 16
RECALL_SCORES = 1 << 24


def tucker_keys(config: MemoryConfig, index: int = 0, layer: int = 1) -> TuckerKeys:
    return TuckerKeys(config)


class TuckerKeys(nn.Module):
    """Slot i * C' + j has the score S_row[i] C S_col[j], C the sum of P cores (r, r) and S[i, a] = query . key of (i, a).

    Coarse: with u, t the first singular vectors of C, the m best sub-keys of each side by S_row u and S_col t; no gradient.
    Fine: of the m * m pairs of these the m best by the score itself. That finds the m best of all C'^2 only where C has rank 1
    and no score is negative; `recall` says how many it finds.

    weights (N, H, m, P), or (N, H, m) of one core: each core's part of the score. There is no softmax, and they may be negative.
    """

    u: Tensor
    t: Tensor

    def __init__(self, config: MemoryConfig):
        super().__init__()
        self.heads, self.rank, self.side = config.heads, config.rank, config.sub_keys_searched
        self.slots = self.side**2
        sets = 1 if config.keys_shared_by_heads else config.heads
        self.backend: Backend = REFERENCE
        self.by_rank, self.alpha = config.queries_by_rank, config.cores_loss
        size = config.query.dim // (2 * config.rank if self.by_rank else 2)
        self.weight = nn.Parameter(torch.randn(sets, 2, self.rank, self.side, size) * size**-0.5)
        features = sets * 2 * self.rank * size
        self.gain = nn.Parameter(torch.full((features,), size**-0.5)) if config.keys_norm == "rms" else None
        self.cores = nn.Parameter(torch.rand(config.heads, config.cores, self.rank, self.rank))
        # Positive matrices have positive first singular vectors: from these on they keep their sign.
        for name in ("u", "t"):
            self.register_buffer(name, torch.ones(config.heads, self.rank))
        self.u, self.t = self.directions()

    def scores(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query (N, H, q') -> S_row, S_col (H, r, N, C'), at least fp32: a rank's scores lie together."""
        with torch.autocast(query.device.type, enabled=False):
            weight: Tensor = self.weight
            sets, _, rank, _, size = weight.shape
            if self.gain is not None:
                weight = F.rms_norm(weight, weight.shape[-1:], eps=1e-6) * self.gain.view(sets, 2, rank, 1, size)
            # Ranks that share a query are one product.
            queries = rank if self.by_rank else 1
            query = query.to(reference.at_least_fp32(query.dtype))
            parts = query.unflatten(-1, (2, queries, size)).permute(1, 2, 3, 0, 4)  # (H, 2, 1 or r, N, q)
            weight = weight.reshape(sets, 2, queries, -1, size).expand(self.heads, -1, -1, -1, -1).to(parts.dtype)
            scores = (parts @ weight.transpose(-1, -2)).unflatten(-1, (-1, self.side)).transpose(3, 4).flatten(2, 3)
        rows, columns = scores.unbind(1)
        return rows, columns

    @torch.no_grad()
    def directions(self) -> tuple[Tensor, Tensor]:
        """First singular vectors u, t (H, r) of the cores' sum, signed so that u is near the last step's."""
        left, _, right = torch.linalg.svd(self.cores.sum(1).to(reference.at_least_fp32(self.cores.dtype)))
        u, t = left[..., 0], right[:, 0]
        flip = torch.where((u * self.u).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        return u * flip, t * flip

    def choose(self, rows: Tensor, columns: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """S_row, S_col (H, r, N, C') -> slots (N, H, m) int64, best first, and each core's part of their scores (N, H, m, P)."""
        cores = self.cores.to(rows.dtype).transpose(2, 3)  # (H, P, b, a)
        with torch.no_grad():
            first, second = (
                self.backend.top((s * v.to(s.dtype)[..., None, None]).sum(1), m)
                for s, v in ((rows, self.u), (columns, self.t))
            )
            pairs = self.backend.top(_grid(cores.sum(1), _taken(rows, first), _taken(columns, second)), m)
            place = pairs // m
            i, j = first.gather(-1, place), second.gather(-1, pairs - place * m)
        left = _product(cores.flatten(1, 2), _taken(rows, i)).unflatten(1, (-1, self.rank))
        parts = (left * _taken(columns, j).unsqueeze(1)).sum(2)
        return (i * self.side + j).transpose(0, 1), parts.permute(2, 0, 3, 1)

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q') -> slots (N, H, k) int64 and their scores (N, H, k), best first."""
        if k > self.side:
            raise UserError(
                f"k = {k} is more than the {self.side} sub-keys of a side", "memory.knn", "choose a lower knn"
            )
        if self.training:
            self.u, self.t = self.directions()
        slots, parts = self.choose(*self.scores(query), k)
        return slots, parts.sum(-1)

    def select(self, query: Query, k: int) -> tuple[Tensor, Tensor]:
        """Slots (N, H, k), and each core's part of their scores (N, H, k, P), or (N, H, k) of one core."""
        if self.training:
            self.u, self.t = self.directions()
        slots, parts = self.choose(*self.scores(query.whole()), k)
        return slots, parts.squeeze(-1) if parts.shape[-1] == 1 else parts

    @torch.no_grad()
    def recall(self, query: Query, slots: Tensor) -> Tensor:
        """Of the k best of all C'^2 slots, the share that was selected, slots (N, H, k): mean over the first few tokens, ()."""
        few = max(1, min(RECALL_TOKENS, RECALL_SCORES // (self.heads * self.slots)))
        rows, columns = self.scores(query.whole()[:few])
        grid = _grid(self.cores.sum(1).to(rows.dtype).mT, rows, columns)
        best = grid.topk(slots.shape[-1]).indices.transpose(0, 1)
        return (best.unsqueeze(-1) == slots[:few].unsqueeze(-2)).any(-1).float().mean()

    def loss(self) -> Tensor | None:
        """alpha / (r - 1) sum over i >= 2 of max(0, l_i - TAU)^2, l the singular values of C, summed over heads; () or None.

        It draws C towards rank 1, where u and t are all of it (UltraMem, section 3.2).
        """
        if not self.alpha:
            return None
        others = torch.linalg.svdvals(self.cores.sum(1).to(reference.at_least_fp32(self.cores.dtype)))[:, 1:]
        return self.alpha / (self.rank - 1) * F.relu(others - TAU).square().sum()

    @torch.no_grad()
    def expected(self, m: int, apart: bool) -> tuple[float, float]:
        """Mean and standard deviation of the m chosen scores, or of each core's part, where all S are N(0, 1), by Monte Carlo."""
        rng = torch.Generator().manual_seed(0)
        shape = (MONTE_CARLO_TOKENS, self.heads, self.side, self.rank)
        drawn = (torch.randn(shape, generator=rng).to(self.cores.device) for _ in range(2))
        rows, columns = (scores.permute(1, 3, 0, 2) for scores in drawn)
        parts = self.choose(rows, columns, m)[1]
        scores = parts if apart else parts.sum(-1)
        return float(scores.mean()), float(scores.std())

    @torch.no_grad()
    def begin(
        self, gains: Tensor | None, tables: Sequence[Tensor], config: MemoryConfig, dim: int, layers: int, ffn: int
    ) -> None:
        """Scale the queries' gains so that the mean of what values are weighed with is 1, and draw the tables accordingly."""
        if self.cores.is_meta:  # laid out, without numbers
            return
        mean, deviation = self.expected(config.knn, apart=config.read == "rows")
        if gains is not None:
            gains.fill_(mean**-0.5)  # both sides' scores have it
        std = config.values_std or values_std(config, dim, layers, ffn, deviation / mean)
        for table in tables:
            table.normal_(std=std)


def _taken(scores: Tensor, places: Tensor) -> Tensor:
    """scores (H, r, N, C') at places (H, N, m) -> (H, r, N, m)."""
    return scores.gather(-1, places.unsqueeze(1).expand(-1, scores.shape[1], -1, -1))


def _grid(cores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Scores of all pairs: cores (H, b, a) transposed, rows (H, a, N, m), columns (H, b, N, m) -> (H, N, m * m)."""
    left = _product(cores, rows)
    grid = left[:, 0].unsqueeze(-1) * columns[:, 0].unsqueeze(-2)
    for b in range(1, left.shape[1]):  # so few that they are no product of matrices
        grid.addcmul_(left[:, b].unsqueeze(-1), columns[:, b].unsqueeze(-2))
    return grid.flatten(-2)


def _product(matrices: Tensor, scores: Tensor) -> Tensor:
    """matrices (H, x, r), scores (H, r, N, m) -> (H, x, N, m)."""
    with torch.autocast(scores.device.type, enabled=False):
        return (matrices @ scores.flatten(2)).unflatten(-1, scores.shape[2:])


def values_std(config: MemoryConfig, dim: int, layers: int, ffn: int, deviation: float) -> float:
    """With which the tables begin so that the output's variance is that of a feed-forward network.

    rows            N(0, E / (2 m H L))                                          (UltraMem, section 3.5)
    experts-linear  s^4 = 0.2 k d / (m H (1 + deviation^2) Dp Dv L), k = ffn / d (UltraMemV2, eq. 22 and 25)
    deviation       of the chosen scores (of rows: each core's part of them), whose mean is 1
    """
    reads = config.knn * config.heads
    if config.read != "experts-linear":
        return (config.expansion / (2 * reads * layers)) ** 0.5
    widths = config.input_width(dim) * config.value_width(dim)
    return (0.2 * ffn / (reads * (1 + deviation**2) * widths * layers)) ** 0.25
