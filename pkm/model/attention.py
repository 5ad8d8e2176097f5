"""Causal self-attention: which tokens a token sees, how it knows where they stand, and what is kept of those before.

Shapes: B windows, T tokens, S tokens seen in all, d model width, H heads of d / H, of which G groups share keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.schema import ModelConfig
from pkm.memory.kernels.reference import at_least_fp32
from pkm.memory.ngram import Back
from pkm.model.dropout import dropout as drop


def build_norm(config: ModelConfig, size: int) -> nn.Module:
    """LayerNorm, or RMSNorm (Zhang and Sennrich, 2019), over the last `size` numbers."""
    if config.norm_type == "rms":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


class Past:
    """Keys and values of the tokens that a window has been read for: what each block's attention needs of them again.

    keys, values    (layers, B, G, context, d / H), filled up to `length` tokens
    """

    def __init__(self, config: ModelConfig, context: int, batch: int, like: Tensor):
        """like    a weight of the model, for its dtype and device"""
        shape = (config.layers, batch, config.kv_heads or config.heads, context, config.dim // config.heads)
        self.keys, self.values = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        self.length = 0
        self.recent: Tensor | None = None  # canonical ids of the last tokens, where n-grams are looked up
        self.convolved: dict[nn.Module, Tensor] = {}  # what each of their convolutions has seen of the last tokens

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a layer, from 0, those of T more tokens (B, G, T, d / H) -> of all tokens so far (B, G, length + T, d / H)."""
        end = self.length + k.shape[2]
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            kept[:, :, self.length : end] = new
        return self.keys[layer, :, :, :end].to(k.dtype), self.values[layer, :, :, :end].to(v.dtype)


class Places(NamedTuple):
    """Where the tokens of a batch stand; the same for every block."""

    angles: Tensor | None = None
    """(B or 1, 1, T, d / H / 2) fp32, by which rotary positions turn each pair of a head's numbers."""
    visible: Tensor | None = None
    """(B or 1, 1, T, S) bool, which tokens each token sees; None = itself and all before it."""
    back: Back | None = None
    """Where n-grams are looked up."""


def token_places(
    config: ModelConfig, length: int, past: int = 0, documents: Tensor | None = None, device: torch.device | None = None
) -> tuple[Tensor, Places]:
    """Positions (B or 1, T) int64 of `length` tokens after `past` others, and what attention must know of them.

    documents    (B, T) int64, ascending: tokens see those of their own number only, and positions begin anew with each
    """
    every = torch.arange(past + length, device=device)
    own = every[past:].unsqueeze(0)
    visible: Tensor | None = None
    if config.window or documents is not None:
        visible = every <= own.unsqueeze(2)
    if config.window and visible is not None:
        visible = visible & (every > own.unsqueeze(2) - config.window)
    if documents is not None and visible is not None:
        visible = visible & (documents.unsqueeze(2) == documents.unsqueeze(1))
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        own = own - torch.where(begins, own, 0).cummax(1).values
    angles = None
    if config.positions == "rotary":
        half = config.dim // config.heads // 2
        frequencies = config.rotary.base ** (-torch.arange(half, device=device).float() / half)
        angles = (own.unsqueeze(-1) * frequencies).unsqueeze(1)
    return own, Places(angles, None if visible is None else visible.unsqueeze(1))


def rotate(x: Tensor, angles: Tensor, pairs: str) -> Tensor:
    """Rotary positions (Su et al., 2021): each pair of the last dimension's numbers turned by its angle.

    pairs    halves: the first half's numbers with the second half's (GPT-NeoX, Llama in transformers, Qwen);
             neighbours: numbers 0 and 1, 2 and 3, ... (the paper, GPT-J, Llama's own code)
    """
    a, b = x.chunk(2, -1) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos(), angles.sin()
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1) if pairs == "halves" else torch.stack(turned, -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention over H heads, each with keys and values of its own or its group's: (B, T, d) -> (B, T, d)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.groups = config.heads, config.kv_heads or config.heads
        self.size = config.dim // config.heads
        self.pairs, self.dropout = config.rotary.pairs, config.dropout
        self.qkv = nn.Linear(config.dim, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.norms = nn.ModuleList(build_norm(config, self.size) for _ in range(2 if config.qk_norm else 0))

    def forward(self, x: Tensor, places: Places, past: Past | None = None, layer: int = 0) -> Tensor:
        """x (B, T, d); with a `past`, which holds those of this `layer`, from 0, T tokens at its beginning or 1 token later on."""
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        dropout = self.dropout if self.training else 0.0
        if x.device.type == "cpu":  # where torch's way back takes twice as long in bf16
            q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            q, k = self._normalised_and_turned(q, k, places.angles)
            if past is not None:
                k, v = past.extend(layer, k, v)
            if self.groups < self.heads and (dropout or places.visible is not None):
                k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
            if dropout and x.device.type == "cpu":
                heads = dropped_attention(q, k, v, dropout, places.visible)
            else:
                heads = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=places.visible, is_causal=places.visible is None and length > 1,
                    dropout_p=dropout, enable_gqa=k.shape[1] < self.heads,
                )  # fmt: skip
        return self.out(heads.transpose(1, 2).reshape(batch, length, dim))

    def _normalised_and_turned(self, q: Tensor, k: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor]:
        """At least in fp32, and back."""
        dtype, wide = q.dtype, at_least_fp32(q.dtype)
        if len(self.norms):
            q, k = (norm(t.to(wide)) for norm, t in zip(self.norms, (q, k), strict=True))
        if angles is not None:
            q, k = (rotate(t.to(wide), angles.to(wide), self.pairs) for t in (q, k))
        return q.to(dtype), k.to(dtype)


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, rate: float, visible: Tensor | None = None) -> Tensor:
    """Attention with dropout on its weights, (B, H, T, d / H) each: torch's own has no fast way for it on a CPU.

    visible    (B or 1, 1, T, T) bool; None = causal
    """
    batch, heads, length, size = q.shape
    unseen = q.new_full((1, length, length), -torch.inf).triu(1)
    if visible is not None:
        unseen = unseen.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
        unseen = unseen.expand(batch, heads, length, length).reshape(batch * heads, length, length)
    q, k, v = (t.reshape(batch * heads, length, size) for t in (q, k, v))
    weights = torch.baddbmm(unseen, q, k.transpose(1, 2), alpha=size**-0.5).softmax(-1)
    return torch.bmm(drop(weights, rate, training=True), v).view(batch, heads, length, size)
