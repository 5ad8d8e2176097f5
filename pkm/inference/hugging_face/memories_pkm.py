"""The memories of modeling_pkm.py: addresses (keys that a query searches, or n-grams of ids), reads and outputs.

Shapes: B texts, T tokens, N = tokens that are no padding, d width, H heads, K slots, C sub-keys a side, k slots that a
head reads, J slots that a token reads, P cores of Tucker keys, E slots a row, w width of a row, q query size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
        h = F.batch_norm(h, self.running_mean, self.running_var, self.weight, self.bias, self.training)  # type: ignore[arg-type]
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


class Rows(nn.Module):
    """The weighted sum of rows."""

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """table (K, w), x (N, d), slots (N, J), weights (N, J), or of Tucker keys (N, J, P) -> (N, width of what is read)."""
        return weighted_sum(table, slots, weights)


def weighted_sum(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """rows and weights (N, J) -> (N, w)."""
    return F.embedding_bag(rows, table, per_sample_weights=weights.to(table.dtype), mode="sum")


class SideBySide(nn.Module):
    """A token's rows one after the other, (N, J w)."""

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return F.embedding(slots, table).flatten(1)


class VirtualRows(nn.Module):
    """A weighted sum of rows for each of E blocks of slots, of each slot P rows, a core's weights for each: (N, E P w)."""

    def __init__(self, slots: int, expansion: int, cores: int):
        super().__init__()
        self.slots, self.expansion, self.cores = slots, expansion, cores

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        block, row = shuffled(slots, self.slots, self.expansion)
        bags = torch.arange(len(x), device=x.device).unsqueeze(1) * self.expansion + block
        bags, order = bags.flatten().sort(stable=True)
        begins = torch.searchsorted(bags, torch.arange(len(x) * self.expansion, device=x.device))
        row, weights = row.flatten()[order] * self.cores, weights.flatten(0, 1)[order].to(table.dtype)
        parts = [
            F.embedding_bag(row + core, table, begins, per_sample_weights=weights[:, core].contiguous(), mode="sum")
            for core in range(self.cores)
        ]
        return torch.stack(parts, 1).view(len(x), -1)


def shuffled(slots: Tensor, rows: int, expansion: int) -> tuple[Tensor, Tensor]:
    """Of each of E * K slots its block, 0 to E - 1, and its row, 0 to K - 1, by pkm's fixed permutation s -> a s mod E K."""
    if expansion == 1:
        return torch.zeros_like(slots), slots
    total = rows * expansion
    step = max(1, round(total * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, total) != 1:
        step += 1
    place = slots * step % total
    return place // rows, place % rows


class SlotExperts(nn.Module):
    """Each slot a network of one hidden unit (PEER: He, 2024): act(u . x), by which its value is multiplied."""

    def __init__(self, activation: str, slots: int, dim: int, like: SlotExperts | None):
        super().__init__()
        of_name: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        self.activation = of_name[activation]
        self.down: nn.Embedding
        own_or_theirs(self, "down", like, slots, dim)

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(table, slots, weights * self.activation(products(self.down, x, slots)))


class LinearExperts(nn.Module):
    """Each slot a linear expert (UltraMemV2, 2025): u . P x, by which its value is multiplied; a row is behind E slots."""

    def __init__(self, slots: int, expansion: int, dim: int, width: int, like: LinearExperts | None):
        super().__init__()
        self.slots, self.expansion = slots, expansion
        self.project = nn.Linear(dim, width, bias=False)
        self.down: nn.Embedding
        own_or_theirs(self, "down", like, slots, width)

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        row = shuffled(slots, self.slots, self.expansion)[1]
        weights = weights.view(*slots.shape, -1).sum(-1) * products(self.down, self.project(x), row)
        return weighted_sum(table, row, weights)


def products(table: nn.Embedding, x: Tensor, rows: Tensor) -> Tensor:
    """x (N, w), rows (N, J) of the table -> (N, J)."""
    found = table(rows).to(wide(x.dtype))
    return (found @ x.to(found.dtype).unsqueeze(-1)).squeeze(-1)


def own_or_theirs(module: nn.Module, name: str, like: nn.Module | None, rows: int, width: int) -> None:
    """Give a module a table of its own, or that of another, whose part it stays."""
    if like is None:
        setattr(module, name, nn.Embedding(rows, width))
    else:
        object.__setattr__(module, name, getattr(like, name))


class AsItIs(nn.Module):
    """What was read y, (N, width of what is read) -> (N, d)."""

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class SiluGate(nn.Module):
    """W2 (y * silu(W1 x + b1)) + b2 of what was read y (Memory Layers at Scale, 2024)."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.gate, self.project = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.project(y * F.silu(self.gate(x)))


class Projection(nn.Module):
    """A linear map of what was read y to the model's width."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.project = nn.Linear(width, dim, bias=False)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.project(y)


class ContextGate(nn.Module):
    """a W_V y of what was read y, with a = sigmoid(rms(x) . rms(W_K y) / sqrt(d)) (Engram, 2026)."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.key, self.value = nn.Linear(width, dim, bias=False), nn.Linear(width, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        a, b = (norm(t) for norm, t in zip(self.norms, (x, self.key(y)), strict=True))
        return torch.sigmoid((a * b).sum(-1, keepdim=True) * x.shape[-1] ** -0.5) * self.value(y)


class Scaled(nn.Module):
    """What was read y, times a number that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.1]))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y * self.scale


class Memory(nn.Module):
    """An address (which rows of a table a token reads, with which weights), a read (what they give) and an output.

    What PkmConfig says of one is `settings`; those of n-grams have "rows": of each head of each order.
    """

    def __init__(self, settings: dict[str, Any], dim: int, like: Memory | None):
        """like    a memory whose tables this one reads too: they stay its parts"""
        super().__init__()
        self.knn, heads, query, hashed = settings["knn"], settings["heads"], settings["query"], "rows" in settings
        self.query: QueryNetwork | None = None
        if not hashed:
            self.query = QueryNetwork(dim, heads, query["dim"], query["hidden"], query["norm"])
        self.keys = KEYS[settings["keys"]](settings)
        # The table: several cores have rows of their own.
        slots = sum(settings["rows"]) if hashed else settings["slots"] or settings["sub_keys"] ** 2
        cores = settings["cores"] if settings["read"] == "rows" else 1
        side_by_side = hashed and settings["gate"] == "engram"
        reads = heads * len(settings["orders"])
        width = settings["values_dim"] or (max(1, dim // reads) if side_by_side else dim)
        self.values: nn.Embedding
        own_or_theirs(self, "values", like, slots * cores, width // cores)
        self.read = build_read(settings, slots, dim, width, like)
        if side_by_side:
            width *= reads
        elif settings["read"] == "rows":
            width *= settings["expansion"]
        self.output = build_output(settings, width, dim)

    def forward(self, x: Tensor, real: Tensor | None, back: Tensor | None) -> Tensor:
        """x (B, T, d), real (B, T) bool, False for padding, which reads nothing -> (B, T, d).

        back    (B, T, longest order) for n-grams: ids that read alike under one number, a token's own and those before it
        """
        tokens = x.flatten(0, 1) if real is None else x[real]
        if self.query is not None:
            slots, weights = self.keys(self.query(tokens), self.knn)
        else:
            assert back is not None
            slots, weights = self.keys(back.flatten(0, 1) if real is None else back[real], 1)
        y = self.read(self.values.weight, tokens, slots.flatten(1), weights.flatten(1, 2)).to(x.dtype)
        y = self.output(y, tokens)
        return y.view(x.shape) if real is None else torch.zeros_like(x).masked_scatter(real.unsqueeze(-1), y)


def build_read(settings: dict[str, Any], slots: int, dim: int, width: int, like: Any) -> nn.Module:
    """slots    rows of the table, a core's; width    of a value; like    a memory whose tables it reads"""
    other = None if like is None else like.read
    if settings["read"] == "experts":
        return SlotExperts(settings["activation"], slots, dim, other)
    if settings["read"] == "experts-linear":
        return LinearExperts(slots, settings["expansion"], dim, settings["input_dim"] or width, other)
    if settings["keys"] == "tucker":
        return VirtualRows(slots, settings["expansion"], settings["cores"])
    return SideBySide() if settings["keys"] == "ngram" and settings["gate"] == "engram" else Rows()


def build_output(settings: dict[str, Any], width: int, dim: int) -> nn.Module:
    """width    of what is read"""
    if settings["gate"] == "silu":
        return SiluGate(width, dim)
    if settings["gate"] == "engram":
        return ContextGate(width, dim)
    if settings["keys"] == "ngram":
        return Scaled()
    own_width = settings["values_dim"] is not None or settings["expansion"] > 1
    return Projection(width, dim) if own_width or settings["read"] == "experts-linear" else AsItIs()
