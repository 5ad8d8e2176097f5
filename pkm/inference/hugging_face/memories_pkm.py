"""The memories of modeling_pkm.py: a table of values, what is read of it, and what becomes of that.

Shapes: B texts, T tokens, S tokens seen in all, N = tokens that are no padding, d width, K slots, J slots that a token
reads, P cores of Tucker keys, E slots a row, w width of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from pkm.inference.hugging_face.keys_pkm import KEYS, QueryNetwork, wide


class Places(NamedTuple):
    """Where the tokens of a batch stand; the same for every block."""

    angles: Tensor | None
    """(B, 1, T, d / heads / 2), by which rotary positions turn pairs of numbers."""
    visible: Callable[[int], Tensor]
    """From S to the mask (B or 1, 1, T, S), True where a token sees another."""
    real: Tensor | None
    """(B, T) bool, False for padding, which reads nothing; None if none is."""
    back: Tensor | None
    """(B, T, longest order) for n-grams: ids that read alike under one number, a token's own and those before it."""
    cache: Any


def kept(cache: Any, layer: int, new: Tensor) -> Tensor:
    """(B, T, w) -> (B, S, w), behind what a layer of the cache has of it: a layer like all others, for beams and cropping."""
    if cache is None:
        return new
    while len(cache.layers) <= layer:
        cache.layers.append(DynamicLayer())
    new = new.unsqueeze(1)
    return cache.update(new, new[..., :0], layer)[0].squeeze(1)


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
        self.down: Table
        own_or_theirs(self, "down", like, slots, dim)

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(table, slots, weights * self.activation(products(self.down, x, slots)))


class LinearExperts(nn.Module):
    """Each slot a linear expert (UltraMemV2, 2025): u . P x, by which its value is multiplied; a row is behind E slots."""

    def __init__(self, slots: int, expansion: int, dim: int, width: int, like: LinearExperts | None):
        super().__init__()
        self.slots, self.expansion = slots, expansion
        self.project = nn.Linear(dim, width, bias=False)
        self.down: Table
        own_or_theirs(self, "down", like, slots, width)

    def forward(self, table: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        row = shuffled(slots, self.slots, self.expansion)[1]
        weights = weights.view(*slots.shape, -1).sum(-1) * products(self.down, self.project(x), row)
        return weighted_sum(table, row, weights)


class Table(nn.Module):
    """Rows (K, w), which it hands out when it is called: accelerate fetches weights that it keeps elsewhere for that call."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def forward(self) -> Tensor:
        return self.weight


def products(table: Table, x: Tensor, rows: Tensor) -> Tensor:
    """x (N, w), rows (N, J) of the table -> (N, J)."""
    found = F.embedding(rows, table()).to(wide(x.dtype))
    return (found @ x.to(found.dtype).unsqueeze(-1)).squeeze(-1)


def own_or_theirs(module: nn.Module, name: str, like: nn.Module | None, rows: int, width: int) -> None:
    """Give a module a table of its own, or that of another, whose part it stays."""
    if like is None:
        setattr(module, name, Table(rows, width))
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
        a, b = (norm(t) for norm, t in zip(self.norms, (x, self.key(y).to(x.dtype)), strict=True))
        return torch.sigmoid((a * b).sum(-1, keepdim=True) * x.shape[-1] ** -0.5) * self.value(y)


class ShortConvolution(nn.Module):
    """u + silu(sum over i < s of c_i rms(u of i * dilation tokens before)) of what the gate gives u, c (s, d) (Engram, 2026).

    Padding gives u = 0. Of all tokens the normalised u are in the cache, in a layer after the blocks'.
    """

    layer: int

    def __init__(self, dim: int, span: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.weight = nn.Parameter(torch.zeros(span, dim))

    def forward(self, u: Tensor, cache: Any) -> Tensor:
        """u (B, T, d) -> (B, T, d)."""
        (_, length, dim), farthest = u.shape, (len(self.weight) - 1) * self.dilation
        seen = F.pad(kept(cache, self.layer, self.norm(u)), (0, 0, farthest, 0))[:, -(length + farthest) :]
        kernel = self.weight.flip(0).T.unsqueeze(1)
        return u + F.silu(F.conv1d(seen.mT, kernel, dilation=self.dilation, groups=dim).mT)


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
        self.values: Table
        own_or_theirs(self, "values", like, slots * cores, width // cores)
        self.read = build_read(settings, slots, dim, width, like)
        if side_by_side:
            width *= reads
        elif settings["read"] == "rows":
            width *= settings["expansion"]
        self.output = build_output(settings, width, dim)
        span = settings["convolution"]
        self.convolution = None if span is None else ShortConvolution(dim, span, max(settings["orders"]))

    def forward(self, x: Tensor, places: Places) -> Tensor:
        """x (B, T, d) -> (B, T, d)."""
        _, _, real, back, cache = places
        tokens = x.flatten(0, 1) if real is None else x[real]
        if self.query is not None:
            slots, weights = self.keys(self.query(tokens), self.knn)
        else:
            assert back is not None
            slots, weights = self.keys(back.flatten(0, 1) if real is None else back[real], 1)
        y = self.read(self.values(), tokens, slots.flatten(1), weights.flatten(1, 2)).to(x.dtype)
        y = self.output(y, tokens).to(x.dtype)
        y = y.view(x.shape) if real is None else torch.zeros_like(x).masked_scatter(real.unsqueeze(-1), y)
        return y if self.convolution is None else self.convolution(y, cache)


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
