"""The section `memory`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from pkm.config.kinds import GATES, KEYS, READS, one_of
from pkm.config.part import Natural, Part, Positive, Rate, Weight


class QueryConfig(Part):
    """The query network: what a token asks a memory."""

    dim: Positive = 512
    """Query size d_q of one head (product keys compare its two halves)."""
    hidden: tuple[Positive, ...] = ()
    """Hidden widths of the query network; none = a linear map."""
    norm: Literal["batch", "layer", "layer_halves", "rms", "none"] = "batch"
    """Normalisation on top of the query network: over the batch, or over each head's query, or over each of its halves."""


class MemoryConfig(Part):
    """Product-key memories, all alike."""

    layers: tuple[Positive, ...] | None = None
    """Blocks that hold a memory, counted from 1."""
    count: Positive | None = None
    """Instead of layers: that many memories at regular intervals."""
    keys: Annotated[str, *one_of(KEYS)] = "product"
    """Key set: pairs of sub-keys, one vector a slot, or pairs whose scores are a Tucker decomposition (UltraMem); ngram = no keys:
    the last ids are the address (Engram)."""
    sub_keys: Positive | None = None
    """Product and Tucker keys: sub-keys a side, C; the memory has C * C slots."""
    slots: Positive | None = None
    """Flat keys: slots, K. ngram: rows of each head of each order; the next primes are taken."""
    orders: tuple[Positive, ...] = (2, 3)
    """ngram: how many of the last ids make an address, a token's own included."""
    heads: Positive = 4
    """Memory heads H, each with its own query network and keys; values are shared. ngram: hashes of each order, with rows of
    their own."""
    keys_norm: Literal["none", "rms"] = "none"
    """Normalisation of each key (of each sub-key of product keys), with a gain for every feature."""
    keys_shared_by_heads: bool = False
    """All heads search one set of keys, each with a query of its own."""
    rank: Positive = 2
    """Tucker keys: numbers that a sub-key's scores are made of, r."""
    cores: Positive = 1
    """Tucker keys: cores whose sum scores a pair; of rows each weighs columns of its own (UltraMem's multi-core scoring)."""
    cores_loss: Weight = 0.0
    """Tucker keys: weight of the loss that draws the cores' sum towards rank 1, where the search misses nothing; 0.001 in UltraMem."""
    expansion: Positive = 1
    """Tucker keys: slots a row, a square number E; of rows each of E blocks of slots has a projection of its own."""
    queries_by_rank: bool = False
    """Tucker keys: of query.dim each rank has a part of its own, as in UltraMemV2."""
    knn: Positive = 32
    """Slots that a head reads, k."""
    query: QueryConfig = QueryConfig()
    read: Annotated[str, *one_of(READS)] = "rows"
    """What a slot gives: rows = its value v; experts = act(u . x) v, u a second table's row, x the memory's input (PEER);
    experts-linear = (u . P x) v (UltraMemV2); summed over the slots with their weights."""
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    """Of experts."""
    values_dim: Positive | None = None
    """Width of a value; null = model.dim. If it is given, what was read is projected to model.dim. Of n-grams with an engram
    gate: of one row; null = as many numbers together as the model's width."""
    input_dim: Positive | None = None
    """experts-linear: width of u and P x; null = that of a value."""
    gate: Annotated[str, *one_of(GATES)] = "none"
    """What becomes of what was read y: none = as it is; silu = W2 (y * silu(W1 x)), as in Memory+; engram = a W_V y, with
    a = sigmoid(rms(x) . rms(W_K y) / sqrt(d)). The rows of n-grams are summed and scaled, for engram side by side."""
    convolution: Positive | None = None
    """engram: tokens, max(orders) apart, that a causal convolution of what the gate gives spans: 4 in the paper; null = none."""
    share_values: bool = False
    """All memories of this section read one table; queries, keys and gates stay each layer's own."""
    values_std: Rate | None = None
    """Standard deviation of the values at the start; null = their width ** -0.5, of n-grams without a gate 0, of Tucker keys
    by the model's layers."""
    place: Literal["replace", "beside", "after", "before"] = "replace"
    """In place of the block's feed-forward network, added to its output, a sublayer of its own after it, or, of n-grams, added
    to what the block gets."""
    skip: Natural = 0
    """beside: blocks after its own in which its output waits before it is added, as in UltraMem, whose 3:7 (from 0) is layers: [4],
    skip: 4."""
    kernels: Literal["auto", "reference", "triton", "faiss"] = "auto"
    """Who searches and reads: auto takes the fastest that the device and the shapes allow."""

    @property
    def size(self) -> int:
        """Rows of a table, K, given or as pairs of sub-keys; of n-grams about (pkm.memory.hashing knows the primes)."""
        if self.keys == "ngram":
            return (self.slots or 0) * self.reads
        return self.slots or (self.sub_keys or 0) ** 2

    @property
    def reads(self) -> int:
        """Rows that a token reads."""
        return self.heads * (len(self.orders) if self.keys == "ngram" else self.knn)

    @property
    def sub_keys_searched(self) -> int:
        """Sub-keys a side with those of the expansion, C'."""
        return (self.sub_keys or 0) * math.isqrt(self.expansion)

    def value_width(self, dim: int) -> int:
        """Numbers of a value, in a model of width `dim`."""
        side_by_side = self.keys == "ngram" and self.gate == "engram"
        return self.values_dim or (max(1, dim // self.reads) if side_by_side else dim)

    def input_width(self, dim: int) -> int:
        """Numbers of a linear expert's input."""
        return self.input_dim or self.value_width(dim)

    def given_width(self, dim: int) -> int:
        """Numbers that a read gives."""
        if self.keys == "ngram" and self.gate == "engram":
            return self.value_width(dim) * self.reads
        return self.value_width(dim) * (self.expansion if self.read == "rows" else 1)

    @property
    def is_projected(self) -> bool:
        """Whether what is read goes through a map to the model's width, though no gate asks for one."""
        return self.values_dim is not None or self.expansion > 1 or self.read == "experts-linear"


Memories = Annotated[
    Annotated[MemoryConfig, Tag("one")] | Annotated[tuple[MemoryConfig, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda given: "several" if isinstance(given, list | tuple) else "one"),
]
