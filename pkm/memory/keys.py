"""Key sets: which slots a query reads, and with what score (paper 3.1, "Standard key assignment" and "The product key set").

Shapes: N tokens, H heads, K slots, C sub-keys a side (K = C * C), q query size, k selected slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.kinds import KEYS, named
from pkm.config.schema import MemoryConfig
from pkm.errors import UserError
from pkm.memory.kernels import reference
from pkm.memory.kernels.backend import REFERENCE, Backend
from pkm.memory.query import Query


class Keys(Protocol):
    """Which slots a query reads, and with which weights. A module; `build_keys` makes what a config names.

    Besides, keys whose search is not exact have a `recall(query, slots)`, and those on whose scores the first values depend a
    `begin` (pkm.memory.tucker).
    """

    slots: int
    """K."""

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> slots (N, H, k) int64, best first, and their scores (N, H, k): the definition of correct."""

    def select(self, query: Query, k: int) -> tuple[Tensor, Tensor]:
        """What a memory reads: slots (N, H, k), int32 or int64, and their weights (N, H, k), at least fp32; of several cores
        (N, H, k, cores)."""


def build_keys(config: MemoryConfig, index: int = 0, layer: int = 1) -> Keys:
    """The keys that `memory.keys` names (pkm.config.kinds), for memory `index` (from 0) of its section, at `layer` (from 1)."""
    keys: Keys = named(KEYS[config.keys].build)(config, index, layer)
    return keys


def product_keys(config: MemoryConfig, index: int = 0, layer: int = 1) -> ProductKeys:
    assert config.sub_keys is not None
    keys = ProductKeys(
        config.heads, config.sub_keys, config.query.dim, config.keys_shared_by_heads, config.keys_norm == "rms"
    )
    keys.refuse_too_many(config.knn)
    return keys


def flat_keys(config: MemoryConfig, index: int = 0, layer: int = 1) -> FlatKeys:
    assert config.slots is not None
    keys = FlatKeys(
        config.heads, config.slots, config.query.dim, config.keys_shared_by_heads, config.keys_norm == "rms"
    )
    keys.refuse_too_many(config.knn)
    return keys


class ProductKeys(nn.Module):
    """Two sets of C sub-keys for each head; slot i * C + j has the key (sub-key i of the first, sub-key j of the second).

    shared        one pair of sets for all heads (PEER)
    normalised    each sub-key by its root mean square, times a gain for every feature (Memory+)
    """

    def __init__(self, heads: int, sub_keys: int, dim: int, shared: bool = False, normalised: bool = False):
        super().__init__()
        self.heads, self.sub_keys, self.slots = heads, sub_keys, sub_keys**2
        self.backend: Backend = REFERENCE
        bound = (dim // 2) ** -0.5
        self.weight = nn.Parameter(torch.empty(_sets(heads, shared), 2, sub_keys, dim // 2).uniform_(-bound, bound))
        self.gain = _gain(_sets(heads, shared) * dim, dim // 2) if normalised else None

    def vectors(self) -> Tensor:
        """Every head's sub-keys as queries are compared with them, (H, 2, C, q / 2)."""
        return _vectors(self.weight, self.gain, (-1, 2, 1, self.weight.shape[-1]), self.heads)

    def refuse_too_many(self, k: int) -> None:
        """UserError if a head cannot find k slots among those of its k best sub-keys a side."""
        if k > self.sub_keys:
            what = f"k = {k} is more than the {self.sub_keys} sub-keys of a side"
            raise UserError(what, "memory.knn", "choose knn <= sub_keys")

    def scores(self, query: Tensor) -> Tensor:
        """query (N, H, q) -> inner products of its halves with the sub-keys (N, H, 2, C), at least fp32."""
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            halves = query.to(dtype).unflatten(-1, (2, -1))
            return torch.einsum("nhsq,hscq->nhsc", halves, self.vectors().to(dtype))

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k) int64 and their scores (N, H, k), best first."""
        self.refuse_too_many(k)
        return reference.select_product(self.scores(query), k)

    def select(self, query: Query, k: int) -> tuple[Tensor, Tensor]:
        """Slots (N, H, k), and the softmax over their scores (paper 3.1, eq. 2)."""
        self.refuse_too_many(k)
        if self.backend.searches_plainly:
            return plainly(self, query, k)
        with torch.autocast(query.raw.device.type, enabled=False):
            keys, bias = fold(self.vectors(), query.scale, query.shift, (self.heads, 2, 1, -1), query.dtype)
            return self.backend.search(query.raw.to(query.dtype), keys, bias, k)

    def search_faiss(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`search` with faiss for the nearest sub-keys; which of equal sub-keys it takes is faiss' choice."""
        from pkm.memory.kernels.faiss_search import nearest

        self.refuse_too_many(k)
        halves, vectors = query.unflatten(-1, (2, -1)), self.vectors()
        first, second = (
            torch.stack([nearest(halves[:, h, side], vectors[h, side], k) for h in range(self.heads)], dim=1)
            for side in (0, 1)
        )
        return reference.select_among(self.scores(query), first, second)


class FlatKeys(nn.Module):
    """One key a slot, for each head its own, or `shared`; `normalised` as product keys are."""

    def __init__(self, heads: int, slots: int, dim: int, shared: bool = False, normalised: bool = False):
        super().__init__()
        self.heads, self.slots = heads, slots
        self.backend: Backend = REFERENCE
        bound = dim**-0.5
        self.weight = nn.Parameter(torch.empty(_sets(heads, shared), slots, dim).uniform_(-bound, bound))
        self.gain = _gain(_sets(heads, shared) * dim, dim) if normalised else None

    def vectors(self) -> Tensor:
        """Every head's keys as queries are compared with them, (H, K, q)."""
        return _vectors(self.weight, self.gain, (-1, 1, self.weight.shape[-1]), self.heads)

    def refuse_too_many(self, k: int) -> None:
        """UserError if there are fewer than k slots."""
        if k > self.slots:
            raise UserError(f"k = {k} is more than the {self.slots} slots", "memory.knn", "choose knn <= slots")

    def search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k) int64 and their scores (N, H, k), best first."""
        self.refuse_too_many(k)
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            return reference.select_flat(query.to(dtype), self.vectors().to(dtype), k)

    def select(self, query: Query, k: int) -> tuple[Tensor, Tensor]:
        """Slots (N, H, k), and the softmax over their scores (paper 3.1, eq. 2)."""
        self.refuse_too_many(k)
        if self.backend.searches_plainly:
            return plainly(self, query, k)
        with torch.autocast(query.raw.device.type, enabled=False):
            keys, bias = fold(self.vectors(), query.scale, query.shift, (self.heads, 1, -1), query.dtype)
            return self.backend.search_flat(query.raw.to(query.dtype), keys, bias, k)

    def search_faiss(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`search` with faiss for the nearest keys; which of equal keys it takes, and their order, is faiss' choice."""
        from pkm.memory.kernels.faiss_search import nearest

        self.refuse_too_many(k)
        vectors = self.vectors()
        slots = torch.stack([nearest(query[:, h], vectors[h], k) for h in range(self.heads)], dim=1)
        with torch.autocast(query.device.type, enabled=False):
            dtype = reference.at_least_fp32(query.dtype)
            heads = torch.arange(self.heads, device=query.device).view(-1, 1)
            return slots, torch.einsum("nhq,nhkq->nhk", query.to(dtype), vectors[heads, slots].to(dtype))


def _sets(heads: int, shared: bool) -> int:
    return 1 if shared else heads


def _gain(features: int, size: int) -> nn.Parameter:
    """Of normalised keys, so that they begin with norm 1; a vector, as the gains of other norms are."""
    return nn.Parameter(torch.full((features,), size**-0.5))


def _vectors(weight: Tensor, gain: Tensor | None, shape: tuple[int, ...], heads: int) -> Tensor:
    """weight (1 or H, ..., q) -> (H, ..., q), normalised if there is a gain, which is viewed as `shape`."""
    if gain is not None:
        weight = F.rms_norm(weight, weight.shape[-1:], eps=1e-6) * gain.view(shape)
    if len(weight) == heads:
        return weight
    return weight.expand(heads, *weight.shape[1:]).contiguous()


def plainly(keys: ProductKeys | FlatKeys, query: Query, k: int) -> tuple[Tensor, Tensor]:
    """`select` by way of `search`, or of faiss."""
    search = keys.search_faiss if keys.backend.faiss else keys.search
    slots, scores = search(query.whole(), k)
    return slots, scores.softmax(-1)


def fold(
    weight: Tensor, scale: Tensor | None, shift: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys (..., C, q) in `dtype` and bias (..., C): key . (query * scale + shift) = (key * scale) . query + key . shift.

    scale, shift    (H, q), viewed as `shape`, or None: nothing to fold

    What rounding to `dtype` takes from a key meets the whole query, whose mean may be many times its deviation: an error
    that is the same for all queries. The bias gives back what it is at -shift / scale, the query that normalises to 0.
    """
    if scale is None or shift is None:
        return weight.to(dtype), weight.new_zeros(weight.shape[:-1])
    scale, shift = scale.view(shape), shift.view(shape)
    exact = weight * scale
    keys, bias = exact.to(dtype), (weight * shift).sum(-1)
    if dtype is exact.dtype:
        return keys, bias
    with torch.no_grad():
        # A feature that is scaled to nothing has no such query, and no error either.
        middle = torch.where(scale.abs() > torch.finfo(torch.float32).eps ** 2, -shift / scale, 0.0)
        lost = ((exact - keys.to(exact.dtype)) * middle).sum(-1)
    return keys, bias + lost
