"""A language model with product-key memories (Lample et al., 2019) for transformers: this file needs it and torch alone.

    AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)

Names of weights are those of the training framework that wrote the directory (pkm). In training the experts' load is
not evened out, and the whole table of a memory gets a gradient: fine for adapters and short runs, else train with pkm.

Shapes: B texts, T tokens, S tokens seen in all, N = tokens that are no padding, d width, H heads, K slots, C sub-keys a
side, k slots that a head reads, q query size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "swiglu": F.silu,
}  # fmt: skip
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class PkmConfig(PretrainedConfig):
    """What config.json says.

    block       the blocks, by the names of pkm's `model:` section
    memories    {block from "1": {name of the module: settings of pkm's `memory:` section, and "shares": memories with the
                same number read the tables of the first of them, null = its own}}
    experts     {block from "1": {"count", "active", "ffn"}}
    """

    model_type = "pkm"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        num_hidden_layers: int = 0,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        max_position_embeddings: int = 0,
        block: dict[str, Any] | None = None,
        memories: dict[str, dict[str, dict[str, Any]]] | None = None,
        experts: dict[str, dict[str, int]] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.block, self.memories, self.experts = block or {}, memories or {}, experts or {}
        super().__init__(**kwargs)


def build_norm(config: PkmConfig, size: int) -> nn.Module:
    if config.block["norm_type"] == "rms":
        return nn.RMSNorm(size, eps=config.block["norm_eps"])
    return nn.LayerNorm(size, eps=config.block["norm_eps"], bias=config.block["bias"])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rotate(x: Tensor, angles: Tensor, pairs: str) -> Tensor:
    """x (B, H, T, d / H), angles (B, 1, T, d / H / 2): each pair of numbers turned by its angle."""
    a, b = x.chunk(2, -1) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos(), angles.sin()
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1) if pairs == "halves" else torch.stack(turned, -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention, (B, T, d) -> (B, T, d); heads may share keys and values in groups."""

    def __init__(self, config: PkmConfig, layer: int):
        super().__init__()
        dim, bias = config.hidden_size, config.block["bias"]
        self.layer, self.heads, self.groups = layer, config.num_attention_heads, config.num_key_value_heads
        self.size = dim // self.heads
        self.pairs, self.dropout = config.block["rotary"]["pairs"], config.block["dropout"]
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.groups) * self.size, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.norms = nn.ModuleList(build_norm(config, self.size) for _ in range(2 if config.block["qk_norm"] else 0))

    def forward(self, x: Tensor, angles: Tensor | None, visible: Callable[[int], Tensor], past: Any) -> Tensor:
        """visible    from S to the mask (B or 1, 1, T, S), True where a token sees another"""
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        if len(self.norms):
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        if angles is not None:
            q, k = (rotate(t.to(wide(t.dtype)), angles, self.pairs).to(v.dtype) for t in (q, k))
        if past is not None:
            k, v = past.update(k, v, self.layer)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible(k.shape[2]), dropout_p=dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, length, dim))


class FeedForward(nn.Module):
    def __init__(self, config: PkmConfig):
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

    def __init__(self, config: PkmConfig, count: int, active: int, ffn: int):
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
            y = y.index_add(0, token, out * weights[token, place].unsqueeze(1).to(out.dtype))
        return y.view(x.shape)


class BatchNorm(nn.Module):
    """Batch normalisation of each feature over tokens: (N, F) -> (N, F)."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)  # type: ignore[arg-type]


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

    shared        one set for all heads: 1 in place of H
    normalised    each key, or sub-key, by its root mean square, times a gain for every feature
    """

    def __init__(self, heads: int, sub_keys: int | None, slots: int, size: int, shared: bool, normalised: bool):
        super().__init__()
        sets, self.heads, self.sub_keys = 1 if shared else heads, heads, sub_keys
        shape = (sets, slots, size) if sub_keys is None else (sets, 2, sub_keys, size // 2)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.gain = nn.Parameter(torch.ones(sets * size)) if normalised else None

    def vectors(self) -> Tensor:
        """As queries are compared with them, one set a head."""
        weight: Tensor = self.weight
        if self.gain is not None:
            size = weight.shape[-1]
            gain = self.gain.view((-1, 1, size) if self.sub_keys is None else (-1, 2, 1, size))
            weight = F.rms_norm(weight, (size,), eps=1e-6) * gain
        return weight.expand(self.heads, *weight.shape[1:])

    def forward(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """query (N, H, q) -> the k best slots of each head (N, H, k) and their scores (N, H, k), best first."""
        weight = self.vectors().to(query.dtype)
        if self.sub_keys is None:
            scores, slots = torch.einsum("nhq,hkq->nhk", query, weight).topk(k, dim=-1)
            return slots, scores
        halves = torch.einsum("nhsq,hscq->nhsc", query.unflatten(-1, (2, -1)), weight)
        best, sub_keys = halves.topk(k, dim=-1)
        sums = best[:, :, 0].unsqueeze(-1) + best[:, :, 1].unsqueeze(-2)
        scores, pairs = sums.flatten(-2).topk(k, dim=-1)
        first, second = sub_keys[:, :, 0].gather(-1, pairs // k), sub_keys[:, :, 1].gather(-1, pairs % k)
        return first * self.sub_keys + second, scores


class SlotExperts(nn.Module):
    """Each slot a network of one hidden unit (PEER: He, 2024): act(u . x), by which its value is multiplied."""

    def __init__(self, activation: str, slots: int, dim: int, like: SlotExperts | None):
        super().__init__()
        of_name: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        self.activation = of_name[activation]
        if like is None:
            self.down = nn.Embedding(slots, dim)
        else:
            object.__setattr__(self, "down", like.down)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """x (N, d), slots (N, J) -> (N, J)."""
        rows = self.down(slots).to(wide(x.dtype))
        return self.activation((rows @ x.to(rows.dtype).unsqueeze(-1)).squeeze(-1))


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


class Memory(nn.Module):
    """The sum over heads of the values of the k slots whose keys fit best, weighted by the softmax of their scores."""

    def __init__(self, settings: dict[str, Any], dim: int, like: Memory | None):
        """like    a memory whose tables this one reads too: they stay its parts"""
        super().__init__()
        self.place, self.knn, heads, query = settings["place"], settings["knn"], settings["heads"], settings["query"]
        slots = settings["slots"] or settings["sub_keys"] ** 2
        self.query = QueryNetwork(dim, heads, query["dim"], query["hidden"], query["norm"])
        shared, normalised = settings["keys_shared_by_heads"], settings["keys_norm"] == "rms"
        self.keys = Keys(heads, settings["sub_keys"], slots, query["dim"], shared, normalised)
        if like is None:
            self.values = nn.Embedding(slots, settings["values_dim"] or dim)
        else:
            object.__setattr__(self, "values", like.values)
        self.read: SlotExperts | None = None
        if settings["read"] == "experts":
            self.read = SlotExperts(settings["activation"], slots, dim, None if like is None else like.read)
        self.output: SiluGate | Projection | None = None
        if settings["gate"] == "silu":
            self.output = SiluGate(settings["values_dim"] or dim, dim)
        elif settings["values_dim"] is not None:
            self.output = Projection(settings["values_dim"], dim)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """x (B, T, d), real (B, T) bool, False for padding, which reads nothing -> (B, T, d)."""
        tokens = x.flatten(0, 1) if real is None else x[real]
        slots, scores = self.keys(self.query(tokens), self.knn)
        table = self.values.weight
        weights, slots = scores.softmax(-1).flatten(1), slots.flatten(1)
        if self.read is not None:
            weights = weights * self.read(tokens, slots)
        y = F.embedding_bag(slots, table, per_sample_weights=weights.to(table.dtype), mode="sum").to(x.dtype)
        if self.output is not None:
            y = self.output(y, tokens)
        return y.view(x.shape) if real is None else torch.zeros_like(x).masked_scatter(real.unsqueeze(-1), y)


class Block(nn.Module):
    """Attention, then a feed-forward network, a memory, or both; each sublayer in a residual sum with a norm."""

    def __init__(self, config: PkmConfig, layer: int, first: dict[int, Memory]):
        """layer    counted from 0
        first    of the memories that share tables the one that has them, which is added here if it is missing
        """
        super().__init__()
        dim, memories = config.hidden_size, config.memories.get(str(layer + 1), {})
        self.names = {settings["place"]: name for name, settings in memories.items()}
        self.pre_norm, self.dropout = config.block["norm"] == "pre", config.block["dropout"]
        self.attention = Attention(config, layer)
        self.feed_forward: nn.Module | None = None
        experts = config.experts.get(str(layer + 1))
        if experts is not None:
            self.feed_forward = Experts(config, **experts)
        elif "replace" not in self.names:
            self.feed_forward = FeedForward(config)
        for name, settings in memories.items():
            shares = settings["shares"]
            memory = Memory(settings, dim, None if shares is None else first.get(shares))
            setattr(self, name, memory)
            if shares is not None:
                first.setdefault(shares, memory)
        self.norms = nn.ModuleList(build_norm(config, dim) for _ in range(3 if "after" in self.names else 2))

    def forward(
        self, x: Tensor, angles: Tensor | None, visible: Callable[[int], Tensor], real: Tensor | None, past: Any
    ) -> Tensor:
        x = self._sublayer(0, x, lambda h: self.attention(h, angles, visible, past))
        x = self._sublayer(1, x, lambda h: self._feed_forward(h, real))
        if "after" in self.names:
            x = self._sublayer(2, x, lambda h: self._memory("after", h, real))
        return x

    def _sublayer(self, i: int, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.norms[i]
        y = F.dropout(of(norm(x) if self.pre_norm else x), self.dropout, self.training)
        return x + y if self.pre_norm else norm(x + y)

    def _feed_forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        y = self._memory("replace", x, real) if self.feed_forward is None else self.feed_forward(x)
        return y + self._memory("beside", x, real) if "beside" in self.names else y

    def _memory(self, place: str, x: Tensor, real: Tensor | None) -> Tensor:
        return getattr(self, self.names[place])(x, real)


class PkmPreTrainedModel(PreTrainedModel):
    config_class = PkmConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Of a model that is made from a config alone: matrices and tables N(0, 1 / inputs), norms 1 and 0."""
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | BatchNorm | HeadsLayerNorm | HeadsRMSNorm) or p.ndim < 2:
                nn.init.constant_(p, 1.0 if name == "weight" else 0.0)
            else:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        if isinstance(module, BatchNorm):
            nn.init.zeros_(module.running_mean)  # type: ignore[arg-type]
            nn.init.ones_(module.running_var)  # type: ignore[arg-type]


class PkmForCausalLM(PkmPreTrainedModel, GenerationMixin):
    """ids -> logits of the next ids. The weights of the token embeddings are the output's too, or there are two of them."""

    def __init__(self, config: PkmConfig):
        super().__init__(config)
        block, dim = config.block, config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, dim)
        learned = block["positions"] == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, dim) if learned else None
        self.embedding_norm = build_norm(config, dim) if block["embedding_norm"] else nn.Identity()
        first: dict[int, Memory] = {}
        self.blocks = nn.ModuleList(Block(config, layer, first) for layer in range(config.num_hidden_layers))
        self.final_norm = build_norm(config, dim) if block["norm"] == "pre" else nn.Identity()
        self.output = None if config.tie_word_embeddings else nn.Embedding(config.vocab_size, dim)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size)) if block["bias"] else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> None:
        """None: the output is no module of transformers' kind, and what is tied is one parameter."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids (B, T); attention_mask (B, S) with 0 for padding; labels (B, T), not shifted, -100 = not counted.

        past_key_values    what `cache` is called in releases of transformers that have no `cache`
        """
        cache = past_key_values if cache is None else cache
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        first = 0 if cache is None else int(cache.get_seq_length())
        own = first + torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        real = None
        if attention_mask is not None and not attention_mask.all():
            attention_mask = attention_mask[:, : first + x.shape[1]].bool()
            real = attention_mask[:, first:]
        else:
            attention_mask = None
        if position_ids is None:
            position_ids = own
            if attention_mask is not None:
                position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, first:]
        x = self._with_positions(x, position_ids)
        angles, visible = self._angles(position_ids), self._visible(own, attention_mask)
        x = F.dropout(self.embedding_norm(x), self.config.block["dropout"], self.training)
        states = [x]
        for block in self.blocks:
            x = block(x, angles, visible, real, cache)
            states.append(x)
        states[-1] = x = self.final_norm(x)
        logits = self._logits(x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        found = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=tuple(states) if output_hidden_states else None,
            **{CACHE: cache if use_cache is not False else None},
        )  # fmt: skip
        return found if return_dict is not False else found.to_tuple()

    def _with_positions(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.positions is None:
            return x
        longest = self.config.max_position_embeddings
        if int(position_ids.max()) >= longest:
            raise ValueError(f"the model has learned positions of {longest} tokens: give it no more at once")
        return x + self.positions(position_ids)

    def _angles(self, position_ids: Tensor) -> Tensor | None:
        if self.config.block["positions"] != "rotary":
            return None
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        turns = torch.arange(half, device=position_ids.device).float() / half
        frequencies = self.config.block["rotary"]["base"] ** -turns
        return (position_ids.unsqueeze(-1) * frequencies).unsqueeze(1)

    def _visible(self, own: Tensor, attention_mask: Tensor | None) -> Callable[[int], Tensor]:
        """own (1, T): which of the tokens seen each is; attention_mask (B, S) bool or None."""
        made: dict[int, Tensor] = {}

        def visible(seen: int) -> Tensor:
            if seen not in made:
                every = torch.arange(seen, device=own.device)
                mask = every <= own.unsqueeze(-1)
                if self.config.block["window"]:
                    mask = mask & (every > own.unsqueeze(-1) - self.config.block["window"])
                if attention_mask is not None:
                    real = F.pad(attention_mask, (0, seen - attention_mask.shape[1]))
                    # Padding sees itself: a row of nothing has no softmax.
                    mask = (mask & real.unsqueeze(1)) | (every == own.unsqueeze(-1))
                made[seen] = mask.unsqueeze(1)
            return made[seen]

        return visible

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = (self.tokens if self.output is None else self.output).weight
        logits = F.linear(hidden, weight, self.output_bias)
        cap = self.config.block["logit_cap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)
