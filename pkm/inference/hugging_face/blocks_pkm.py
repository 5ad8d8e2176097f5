"""The blocks of modeling_pkm.py: attention, then a feed-forward network, experts, memories.

Shapes: B texts, T tokens, S tokens seen in all, d width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pkm.inference.hugging_face.keys_pkm import wide
from pkm.inference.hugging_face.memories_pkm import Memory, Places

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "swiglu": F.silu,
}  # fmt: skip


def build_norm(config: PretrainedConfig, size: int) -> nn.Module:
    if config.block["norm_type"] == "rms":
        return nn.RMSNorm(size, eps=config.block["norm_eps"])
    return nn.LayerNorm(size, eps=config.block["norm_eps"], bias=config.block["bias"])


def rotate(x: Tensor, angles: Tensor, pairs: str) -> Tensor:
    """x (B, H, T, d / H), angles (B, 1, T, d / H / 2): each pair of numbers turned by its angle."""
    a, b = x.chunk(2, -1) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos(), angles.sin()
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1) if pairs == "halves" else torch.stack(turned, -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention, (B, T, d) -> (B, T, d); heads may share keys and values in groups."""

    def __init__(self, config: PretrainedConfig, layer: int):
        super().__init__()
        dim, bias = config.hidden_size, config.block["bias"]
        self.layer, self.heads, self.groups = layer, config.num_attention_heads, config.num_key_value_heads
        self.size = dim // self.heads
        self.pairs, self.dropout = config.block["rotary"]["pairs"], config.block["dropout"]
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.groups) * self.size, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.norms = nn.ModuleList(build_norm(config, self.size) for _ in range(2 if config.block["qk_norm"] else 0))

    def forward(self, x: Tensor, places: Places) -> Tensor:
        angles, visible, *_, cache = places
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        if len(self.norms):
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if angles is not None:
            q, k = (rotate(t.to(wide(t.dtype)), angles, self.pairs).to(v.dtype) for t in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible(k.shape[2]), dropout_p=dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, length, dim))


class FeedForward(nn.Module):
    def __init__(self, config: PretrainedConfig):
        super().__init__()
        dim, hidden, bias = config.hidden_size, config.intermediate_size, config.block["bias"]
        self.activation = ACTIVATIONS[config.block["activation"]]
        self.expand = nn.Linear(dim, hidden, bias=bias)
        self.contract = nn.Linear(hidden, dim, bias=bias)
        self.gate = nn.Linear(dim, hidden, bias=bias) if config.block["activation"] == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.contract(self.activation(self.gate(x)) * self.expand(x))
        return self.contract(self.activation(self.expand(x)))


class Experts(nn.Module):
    """The weighted sum of the `active` feed-forward networks that the router finds most probable, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: PretrainedConfig, count: int, active: int, ffn: int):
        super().__init__()
        dim = config.hidden_size
        self.active, self.activation = active, ACTIVATIONS[config.block["activation"]]
        self.router = nn.Linear(dim, count, bias=False)
        self.expand = nn.Parameter(torch.zeros(count, ffn, dim))
        self.contract = nn.Parameter(torch.zeros(count, dim, ffn))
        gated = config.block["activation"] == "swiglu"
        self.gate = nn.Parameter(torch.zeros(count, ffn, dim)) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).to(wide(x.dtype)).softmax(-1).topk(self.active, dim=-1)
        if self.active > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            here = tokens[token]
            expanded = F.linear(here, self.expand[expert])
            gate = expanded if self.gate is None else F.linear(here, self.gate[expert])
            hidden = self.activation(gate) if self.gate is None else self.activation(gate) * expanded
            out = F.linear(hidden, self.contract[expert])
            y = y.index_add(0, token, (out * weights[token, place].unsqueeze(1)).to(y.dtype))
        return y.view(x.shape)


class Block(GradientCheckpointingLayer):
    """Attention, then a feed-forward network, a memory, or both; each sublayer in a residual sum with a norm.

    skip    after how many more blocks what a memory beside the network gives joins the stream
    """

    def __init__(self, config: PretrainedConfig, layer: int, first: dict[int, Memory]):
        """layer    counted from 0
        first    of each section whose memories share tables the one that has them; it grows
        """
        super().__init__()
        dim, memories = config.hidden_size, config.memories.get(str(layer + 1), {})
        self.names = {settings["place"]: name for name, settings in memories.items()}
        self.skip = max((settings["skip"] for settings in memories.values()), default=0)
        self.pre_norm, self.dropout = config.block["norm"] == "pre", config.block["dropout"]
        self.attention = Attention(config, layer)
        self.feed_forward: nn.Module | None = None
        experts = config.experts.get(str(layer + 1))
        if experts is not None:
            self.feed_forward = Experts(config, **experts)
        elif "replace" not in self.names:
            self.feed_forward = FeedForward(config)
        for name, settings in memories.items():
            memory = Memory(settings, dim, first.get(settings["section"]))
            setattr(self, name, memory)
            if settings["share_values"]:
                first.setdefault(settings["section"], memory)
        self.norms = nn.ModuleList(build_norm(config, dim) for _ in range(3 if "after" in self.names else 2))

    def forward(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor | None]:
        """x (B, T, d) -> (B, T, d), and what joins it later, if anything does."""
        if "before" in self.names:
            x = x + F.dropout(self._memory("before", x, places), self.dropout, self.training)
        x = self._sublayer(0, x, lambda h: self.attention(h, places))
        late = None
        if self.skip:
            late = self._memory("beside", self.norms[1](x) if self.pre_norm else x, places)
            late = F.dropout(late, self.dropout, self.training)
        x = self._sublayer(1, x, lambda h: self._feed_forward(h, places))
        if "after" in self.names:
            x = self._sublayer(2, x, lambda h: self._memory("after", h, places))
        return x, late

    def _sublayer(self, i: int, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.norms[i]
        y = F.dropout(of(norm(x) if self.pre_norm else x), self.dropout, self.training)
        return x + y if self.pre_norm else norm(x + y)

    def _feed_forward(self, x: Tensor, places: Places) -> Tensor:
        y = self._memory("replace", x, places) if self.feed_forward is None else self.feed_forward(x)
        return y + self._memory("beside", x, places) if "beside" in self.names and not self.skip else y

    def _memory(self, place: str, x: Tensor, places: Places) -> Tensor:
        return getattr(self, self.names[place])(x, places)
