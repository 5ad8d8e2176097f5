"""The product-key memory layer: query network -> key search -> weighted read of values (paper 3.1).

Shapes: B windows, T tokens, N = B * T, d model width, H heads, k slots a head reads, K slots, q query size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from pkm.config.schema import MemoryConfig
from pkm.memory.kernels import backend
from pkm.memory.keys import FlatKeys, ProductKeys
from pkm.memory.query import BatchNorm, QueryNetwork
from pkm.memory.sharding import read_sharded
from pkm.memory.values import Values


class MemoryLayer(nn.Module):
    """m(x) = sum over heads of sum over the k selected slots i of w_i v_i, w = softmax of their scores (paper eq. 1-3).

    Under autocast the query network and products with keys run in its dtype; scores, softmax and statistics stay in fp32.

    record     if True, `selection` holds what the last forward selected: indices (N, H, k) and weights (N, H, k) of all
               tokens, and which of them are not padding, (N,) bool, or None where no mask was given; and `squares` the
               mean squares of the last output and of the residual stream that it was added to
    sharded    if True, `values` holds this rank's columns only (pkm.memory.sharding)
    """

    selection: tuple[Tensor, Tensor, Tensor | None]
    squares: tuple[Tensor, Tensor]

    def __init__(self, config: MemoryConfig, dim: int):
        super().__init__()
        backend.check(config.kernels)
        self.heads, self.knn, self.wanted_kernels = config.heads, config.knn, config.kernels
        self.query = QueryNetwork(config.query, dim, config.heads)
        self.keys: ProductKeys | FlatKeys
        if config.keys == "product":
            assert config.sub_keys is not None
            self.keys = ProductKeys(config.heads, config.sub_keys, config.query.dim)
        else:
            assert config.slots is not None
            self.keys = FlatKeys(config.heads, config.slots, config.query.dim)
        self.values = Values(self.keys.slots, dim, config.values_std)
        self.record = False
        self.sharded = False

    @property
    def slots(self) -> int:
        return self.keys.slots

    def output_share(self) -> float:
        """rms of the last recorded output over rms of the residual stream that it was added to."""
        output, residual = self.squares
        return float((output / residual).sqrt())

    @property
    def kernels(self) -> str:
        """One line: who computes this layer where its weights are now."""
        return backend.describe(self.wanted_kernels, self.values.weight.device)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, d), mask (B, T) bool with True for real tokens -> (B, T, d); 0 for padding, which reads nothing."""
        kernels = backend.choose(self.wanted_kernels, x.device)
        if kernels == "triton" and x.dtype is torch.float64:
            kernels = "torch"
        tokens = x.flatten(0, -2)
        real = None if mask is None else mask.flatten()
        indices, weights = self.search(tokens, real, kernels)
        if self.record:
            # Padding too: how many tokens are none would be a size that compiled code cannot know.
            self.selection = indices, weights.detach(), real
        if real is not None:
            padding = ~real.view(-1, 1, 1)
            indices = indices.masked_fill(padding, -1)
            weights = weights.masked_fill(padding, 0)  # also where they are NaN
        read = partial(read_sharded, self.values) if self.sharded else self.values.read
        return read(indices.flatten(1), weights.flatten(1), compute_dtype(x), kernels).view(x.shape)

    def search(self, tokens: Tensor, real: Tensor | None, kernels: str) -> tuple[Tensor, Tensor]:
        """tokens (N, d), real (N,) bool or None -> slots (N, H, k) and weights (N, H, k), at least fp32."""
        if isinstance(self.query.norm, BatchNorm):
            self.query.norm.kernels = kernels
        if self.wanted_kernels == "faiss":
            indices, scores = self.keys.search_faiss(self.query(tokens, real), self.knn)
        elif kernels == "reference":
            indices, scores = self.keys.search(self.query(tokens, real), self.knn)
        else:
            query, scale, shift = self.query.unfolded(tokens, real)
            return self.keys.select(query.to(compute_dtype(tokens)), scale, shift, self.knn, kernels)
        return indices, scores.softmax(-1)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
