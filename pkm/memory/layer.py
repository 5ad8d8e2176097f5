"""The product-key memory layer: query network -> key search -> weighted read of values (paper 3.1).

Shapes: B windows, T tokens, N = B * T, d model width, H heads, k slots a head reads, K slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pkm.config import MemoryConfig
from pkm.memory.keys import FlatKeys, ProductKeys
from pkm.memory.query import QueryNetwork
from pkm.memory.ranks import read_sharded
from pkm.memory.values import Values


class MemoryLayer(nn.Module):
    """m(x) = sum over heads of sum over the k selected slots i of w_i v_i, w = softmax of their scores (paper eq. 1-3).

    record     if True, `selection` holds what the last forward read: (indices (N, H, k) int64, weights (N, H, k) fp32) of the
               tokens that are not padding
    sharded    if True, `values` holds this rank's columns only (pkm.memory.ranks)
    """

    selection: tuple[Tensor, Tensor]

    def __init__(self, config: MemoryConfig, dim: int):
        super().__init__()
        self.heads, self.knn = config.heads, config.knn
        self.query = QueryNetwork(config.query, dim, config.heads)
        self.keys: ProductKeys | FlatKeys
        if config.keys == "product":
            assert config.sub_keys is not None
            self.keys = ProductKeys(config.heads, config.sub_keys, config.query.dim)
        else:
            assert config.slots is not None
            self.keys = FlatKeys(config.heads, config.slots, config.query.dim)
        self.values = Values(self.keys.slots, dim)
        self.record = False
        self.sharded = False

    @property
    def slots(self) -> int:
        return self.keys.slots

    @property
    def kernels(self) -> str:
        """One line: what computes this layer."""
        return "reference (plain PyTorch)"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, d), mask (B, T) bool with True for real tokens -> (B, T, d); 0 for padding, which reads nothing."""
        tokens = x.flatten(0, -2)
        real = None if mask is None else mask.flatten()
        indices, scores = self.keys.search(self.query(tokens, real), self.knn)
        weights = scores.softmax(-1)
        if self.record:
            picked = (indices, weights.detach()) if real is None else (indices[real], weights.detach()[real])
            self.selection = picked
        if real is not None:
            indices = indices.masked_fill(~real.view(-1, 1, 1), -1)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        if self.sharded:
            return read_sharded(self.values, indices.flatten(1), weights.flatten(1), dtype).view(x.shape)
        return self.values.read(indices.flatten(1), weights.flatten(1), dtype).view(x.shape)
