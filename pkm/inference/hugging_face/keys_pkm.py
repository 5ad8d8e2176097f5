"""Which rows of its table a memory reads: those of keys that a query searches, or of n-grams of ids.

Shapes: B texts, T tokens, N = tokens that are no padding, d width, H heads, K slots, C sub-keys a side, k slots that a
head reads, J slots that a token reads, P cores of Tucker keys, q query size.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class BatchNorm(nn.Module):
    """Batch normalisation of each feature over tokens: (N, F) -> (N, F)."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.weight.dtype)
        # A batch counts once that activation checkpointing computes again in backward.
        momentum = 0.1 if torch._C._current_graph_task_id() == -1 else 0.0
        h = F.batch_norm(h, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum)  # type: ignore[arg-type]
        return h.to(x.dtype)


class HeadsLayerNorm(nn.Module):
    """Layer normalisation of each of `parts` equal parts, with a weight for every feature: (N, F) -> (N, F)."""

    def __init__(self, parts: int, features: int):
        super().__init__()
        self.parts = parts
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.parts, -1))
        return F.layer_norm(parts, parts.shape[-1:]).flatten(-2) * self.weight + self.bias


class HeadsRMSNorm(nn.Module):
    """Each head's features over their root mean square, with a weight for every feature: (N, H * q) -> the same."""

    def __init__(self, heads: int, features: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.heads, -1))
        return F.rms_norm(parts, parts.shape[-1:], eps=1e-6).flatten(-2) * self.weight


class HeadsLinear(nn.Module):
    """A linear map of its own for each head: (N, H * a) -> (N, H * b)."""

    def __init__(self, heads: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(heads, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (len(self.weight), -1)).transpose(0, 1)
        return (x @ self.weight + self.bias).transpose(0, 1).flatten(1)


class QueryNetwork(nn.Module):
    """A token's query for each head, normalised: (N, d) -> (N, H, q)."""

    def __init__(self, dim: int, heads: int, size: int, hidden: list[int], norm: str):
        super().__init__()
        self.heads = heads
        sizes = [*hidden, size]
        self.first = nn.Linear(dim, heads * sizes[0])
        self.deeper = nn.ModuleList(HeadsLinear(heads, a, b) for a, b in pairwise(sizes))
        self.norm: nn.Module = nn.Identity()
        if norm == "batch":
            self.norm = BatchNorm(heads * size)
        elif norm == "rms":
            self.norm = HeadsRMSNorm(heads, heads * size)
        elif norm != "none":
            self.norm = HeadsLayerNorm(heads * (2 if norm == "layer_halves" else 1), heads * size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.deeper:
            h = layer(F.relu(h))
        return self.norm(h.to(wide(h.dtype))).unflatten(-1, (self.heads, -1))


class Keys(nn.Module):
    """Product keys, weight (H, 2, C, q / 2): slot i * C + j has sub-keys i and j; or flat keys, weight (H, K, q).

    Heads that share one set have 1 in place of H; normalised is each key, or sub-key, by its root mean square, times a gain
    for every feature.
    """

    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.heads, self.sub_keys, size = settings["heads"], settings["sub_keys"], settings["query"]["dim"]
        sets = 1 if settings["keys_shared_by_heads"] else self.heads
        shape = (2, self.sub_keys, size // 2) if self.sub_keys else (settings["slots"], size)
        self.weight = nn.Parameter(torch.zeros(sets, *shape))
        self.gain = nn.Parameter(torch.ones(sets * size)) if settings["keys_norm"] == "rms" else None

    def vectors(self) -> Tensor:
        """As queries are compared with them, one set a head."""
        weight: Tensor = self.weight
        if self.gain is not None:
            size = weight.shape[-1]
            gain = self.gain.view((-1, 1, size) if self.sub_keys is None else (-1, 2, 1, size))
            weight = F.rms_norm(weight, (size,), eps=1e-6) * gain
        return weight.expand(self.heads, *weight.shape[1:])

    def forward(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k), best first, and the softmax of their scores (N, H, k)."""
        weight = self.vectors().to(query.dtype)
        if self.sub_keys is None:
            scores, slots = torch.einsum("nhq,hkq->nhk", query, weight).topk(k, dim=-1)
            return slots, scores.softmax(-1)
        halves = torch.einsum("nhsq,hscq->nhsc", query.unflatten(-1, (2, -1)), weight)
        best, sub_keys = halves.topk(k, dim=-1)
        sums = best[:, :, 0].unsqueeze(-1) + best[:, :, 1].unsqueeze(-2)
        scores, pairs = sums.flatten(-2).topk(k, dim=-1)
        first, second = sub_keys[:, :, 0].gather(-1, pairs // k), sub_keys[:, :, 1].gather(-1, pairs % k)
        return first * self.sub_keys + second, scores.softmax(-1)


class TuckerKeys(nn.Module):
    """Slot i * C + j has the score S_row[i] core S_col[j], the core a sum of P matrices (r, r) and S[i, a] = query . key of
    (i, a) (UltraMem, 2024). The k best of each side by the core's first singular vectors u, t make pairs, of which the k best
    are read; weights are the scores, by core.
    """

    u: Tensor
    t: Tensor

    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.heads, self.rank, self.by_rank = settings["heads"], settings["rank"], settings["queries_by_rank"]
        self.side = settings["sub_keys"] * math.isqrt(settings["expansion"])
        sets = 1 if settings["keys_shared_by_heads"] else self.heads
        size = settings["query"]["dim"] // (2 * self.rank if self.by_rank else 2)
        self.weight = nn.Parameter(torch.zeros(sets, 2, self.rank, self.side, size))
        self.gain = nn.Parameter(torch.ones(sets * 2 * self.rank * size)) if settings["keys_norm"] == "rms" else None
        self.cores = nn.Parameter(torch.ones(self.heads, settings["cores"], self.rank, self.rank))
        for name in ("u", "t"):
            self.register_buffer(name, torch.ones(self.heads, self.rank))

    def scores(self, query: Tensor) -> Tensor:
        """query (N, H, q) -> S (N, H, 2, C, r)."""
        weight: Tensor = self.weight
        if self.gain is not None:
            sets, _, rank, _, size = weight.shape
            weight = F.rms_norm(weight, (size,), eps=1e-6) * self.gain.view(sets, 2, rank, 1, size)
        weight = weight.expand(self.heads, *weight.shape[1:]).to(query.dtype)
        sides = query.unflatten(-1, (2, -1))
        if self.by_rank:
            return torch.einsum("nhsaq,hsacq->nhsca", sides.unflatten(-1, (self.rank, -1)), weight)
        return torch.einsum("nhsq,hsacq->nhsca", sides, weight)

    @torch.no_grad()
    def directions(self) -> tuple[Tensor, Tensor]:
        """u, t (H, r), signed so that u is near what it was."""
        left, _, right = torch.linalg.svd(self.cores.sum(1).to(wide(self.cores.dtype)))
        u, t = left[..., 0], right[:, 0]
        flip = torch.where((u * self.u).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        return (u * flip).to(self.u.dtype), (t * flip).to(self.t.dtype)

    def forward(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> slots (N, H, k), best first, and each core's part of their scores (N, H, k, P)."""
        if self.training:
            self.u, self.t = self.directions()
        rows, columns = self.scores(query).unbind(2)
        cores = self.cores.to(query.dtype)
        with torch.no_grad():
            i, j = (
                torch.einsum("nhca,ha->nhc", s, v.to(s.dtype)).topk(k, dim=-1).indices
                for s, v in ((rows, self.u), (columns, self.t))
            )
            grid = torch.einsum("nhia,hab,nhjb->nhij", _taken(rows, i), cores.sum(1), _taken(columns, j))
            pairs = grid.flatten(-2).topk(k, dim=-1).indices
            i, j = i.gather(-1, pairs // k), j.gather(-1, pairs % k)
        parts = torch.einsum("nhka,hpab,nhkb->nhkp", _taken(rows, i), cores, _taken(columns, j))
        return i * self.side + j, parts


def _taken(scores: Tensor, places: Tensor) -> Tensor:
    """scores (N, H, C, r) at places (N, H, k) -> (N, H, k, r)."""
    return scores.gather(-2, places.unsqueeze(-1).expand(*places.shape, scores.shape[-1]))


class NgramKeys(nn.Module):
    """Row of an order n and a head: ((c_t m_0) xor ... xor (c_{t-n+1} m_{n-1})) mod as many rows as it has (Engram, 2026)."""

    multipliers: Tensor

    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.orders, self.heads, self.rows = settings["orders"], settings["heads"], settings["rows"]
        self.register_buffer("multipliers", torch.ones(max(self.orders), dtype=torch.int64))

    def forward(self, back: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """back (N, longest order or more): ids, those that read alike as one, a token's own first -> rows (N, J, 1), weights of 1."""
        mixed, hashes = back[:, : len(self.multipliers)] * self.multipliers, []
        total = torch.zeros_like(mixed[:, 0])
        for order, part in enumerate(mixed.unbind(1), start=1):
            total = total ^ part
            hashes += [total] * (self.heads if order in self.orders else 0)
        rows = torch.tensor(self.rows, device=back.device)
        found = torch.stack(hashes, 1) % rows + (rows.cumsum(0) - rows)
        return found.unsqueeze(-1), torch.ones_like(found, dtype=torch.float32).unsqueeze(-1)


KEYS: dict[str, type[Keys | TuckerKeys | NgramKeys]] = {
    "product": Keys, "flat": Keys, "tucker": TuckerKeys, "ngram": NgramKeys,
}  # fmt: skip
