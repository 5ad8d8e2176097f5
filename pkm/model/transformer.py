"""The transformer, with product-key memories where the config puts them (paper 4, figure 3).

Shapes: B windows, T tokens of context, d model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pkm.config.schema import Config, ModelConfig
from pkm.distributed import dist
from pkm.memory.kernels.reference import at_least_fp32
from pkm.memory.layer import MemoryLayer
from pkm.memory.values import Values, tables
from pkm.model.dropout import dropout as drop
from pkm.model.loss import linear_cross_entropy

LAYER_NORM_EPS = 1e-12  # XLM's


class Past:
    """Keys and values of the tokens that a window has been read for: what each block's attention needs of them again.

    keys, values    (layers, B, H, context, d / H), filled up to `length` tokens
    """

    def __init__(self, model: Transformer, batch: int):
        weight, heads = model.tokens.weight, model.heads
        shape = (len(model.blocks), batch, heads, model.context, weight.shape[1] // heads)
        self.keys, self.values = (torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a layer, from 0, those of T more tokens (B, H, T, d / H) -> of all tokens so far (B, H, length + T, d / H)."""
        end = self.length + k.shape[2]
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            kept[:, :, self.length : end] = new
        return self.keys[layer, :, :, :end].to(k.dtype), self.values[layer, :, :, :end].to(v.dtype)


class Attention(nn.Module):
    """Causal self-attention over H heads: (B, T, d) -> (B, T, d)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, past: Past | None = None, layer: int = 0) -> Tensor:
        """x (B, T, d); with a `past`, which holds those of this `layer`, from 0, T tokens at its beginning or 1 token later on."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if x.device.type == "cpu":  # where torch's way back takes twice as long in bf16
            q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (q, k, v))
        if past is not None:
            k, v = past.extend(layer, k, v)
        with torch.autocast("cpu", enabled=False):
            if dropout and x.device.type == "cpu":
                heads = dropped_attention(q, k, v, dropout)
            else:
                heads = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, dropout_p=dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, length, dim))


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
    """Causal attention with dropout on its weights, (B, H, T, d / H) each: torch's own has no fast way for it on a CPU."""
    batch, heads, length, size = q.shape
    future = q.new_full((1, length, length), -torch.inf).triu(1)
    q, k, v = (t.reshape(batch * heads, length, size) for t in (q, k, v))
    weights = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5).softmax(-1)
    return torch.bmm(drop(weights, rate, training=True), v).view(batch, heads, length, size)


class FeedForward(nn.Module):
    """Two linear maps with an activation between: (B, T, d) -> (B, T, d)."""

    def __init__(self, config: ModelConfig, hidden: int):
        super().__init__()
        self.activation = F.gelu if config.activation == "gelu" else F.relu
        self.expand = nn.Linear(config.dim, hidden)
        self.contract = nn.Linear(hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.activation(self.expand(x)))


class Block(nn.Module):
    """Attention, then a feed-forward network, a memory, or both; each sublayer in a residual sum with a LayerNorm.

    post-norm (XLM): x <- LN(x + f(x));  pre-norm: x <- x + f(LN(x)).
    """

    def __init__(self, config: Config, with_memory: bool):
        super().__init__()
        dim, place = config.model.dim, config.memory.place if config.memory and with_memory else None
        self.place = place
        self.pre_norm = config.model.norm == "pre"
        self.attention = Attention(config.model)
        self.feed_forward = None if place == "replace" else FeedForward(config.model, config.ffn)
        self.memory = MemoryLayer(config.memory, dim) if config.memory and with_memory else None
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=LAYER_NORM_EPS) for _ in range(3 if place == "after" else 2))
        self.dropout = config.model.dropout

    def forward(self, x: Tensor, mask: Tensor | None, past: Past | None = None, layer: int = 0) -> Tensor:
        """x (B, T, d); mask (B, T) bool, True for tokens that are not padding, or None if none are; the rest as Attention's."""
        x = self._sublayer(0, x, lambda h: self.attention(h, past, layer))
        residual = x
        x = self._sublayer(1, x, lambda h: self._feed_forward(h, mask, residual))
        if self.place == "after":
            after = x
            x = self._sublayer(2, x, lambda h: self._memory(h, mask, after))
        return x

    def _sublayer(self, i: int, x: Tensor, f) -> Tensor:  # type: ignore[no-untyped-def]
        norm = self.norms[i]
        y = drop(f(norm(x) if self.pre_norm else x), self.dropout, self.training)
        return x + y if self.pre_norm else norm(x + y)

    def _feed_forward(self, x: Tensor, mask: Tensor | None, residual: Tensor) -> Tensor:
        if self.feed_forward is None:
            return self._memory(x, mask, residual)
        y = self.feed_forward(x)
        return y + self._memory(x, mask, residual) if self.place == "beside" else y

    def _memory(self, x: Tensor, mask: Tensor | None, residual: Tensor) -> Tensor:
        assert self.memory is not None
        y = self.memory(x, mask)
        if self.memory.record:
            self.memory.squares = y.detach().float().square().mean(), residual.detach().float().square().mean()
        return y


class Transformer(nn.Module):
    """A causal language model: ids -> the next id's log-probabilities.

    Embeddings of tokens (tied with the output, which adds a bias) and of learned positions, a LayerNorm over their sum
    as in XLM, the blocks, and with pre-norm one more LayerNorm before the output.

    activation_checkpointing    in training keep only each block's input, and run it again in backward
    """

    def __init__(self, config: Config, vocab_size: int):
        super().__init__()
        model = config.model
        self.context, self.heads = config.corpus.context, config.model.heads
        self.activation_checkpointing = False
        self.tokens = nn.Embedding(vocab_size, model.dim)
        self.positions = nn.Embedding(self.context, model.dim)
        self.embedding_norm = nn.LayerNorm(model.dim, eps=LAYER_NORM_EPS) if model.embedding_norm else nn.Identity()
        self.dropout = model.dropout
        holds_memory = set(config.memory_layers)
        self.blocks = nn.ModuleList(Block(config, layer in holds_memory) for layer in range(1, model.layers + 1))
        self.final_norm = nn.LayerNorm(model.dim, eps=LAYER_NORM_EPS) if model.norm == "pre" else nn.Identity()
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=model.dim**-0.5)

    def memories(self) -> Iterator[tuple[int, MemoryLayer]]:
        """(layer counted from 1, its memory), in order."""
        for layer, block in enumerate(self.blocks, start=1):
            if block.memory is not None:
                yield layer, block.memory  # type: ignore[misc]

    def memory(self, layer: int) -> MemoryLayer:
        """The memory of a layer counted from 1."""
        return self.blocks[layer - 1].memory  # type: ignore[return-value]

    def tables(self) -> dict[str, Values]:
        """Every table of values by its name in the model, once, however many layers read it."""
        return tables(self)

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """All other parameters by group and name: dense, embeddings (output layer's too: it is tied to them), addressing."""
        of_tables = {id(table.weight) for table in self.tables().values()}
        of = {id(p): "embeddings" for p in (self.tokens.weight, self.positions.weight)}
        of |= {id(p): "addressing" for _, memory in self.memories() for p in memory.addressing()}
        groups: dict[str, dict[str, nn.Parameter]] = {"dense": {}, "embeddings": {}, "addressing": {}}
        for name, p in self.named_parameters():
            if id(p) not in of_tables:
                groups[of.get(id(p), "dense")][name] = p
        return {group: parameters for group, parameters in groups.items() if parameters}

    def hidden(self, ids: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        """ids (B, T) int64, T <= context -> hidden states (B, T, d) that the output layer reads.

        mask    (B, T) bool, True for tokens that are not padding; None if none are, as in training
        past    of the tokens before these, which it then holds besides: T tokens if it is empty, else 1
        """
        first = 0 if past is None else past.length
        x = self.tokens(ids) + self.positions.weight[first : first + ids.shape[1]]
        x = drop(self.embedding_norm(x), self.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            if past is not None:
                x = block(x, mask, past, layer)
            elif self.activation_checkpointing and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        if past is not None:
            past.length += ids.shape[1]
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) -> (..., V)."""
        return F.linear(hidden, self.tokens.weight, self.output_bias)

    def forward(self, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log-likelihood in nats, fp32, summed over the targets that are not IGNORE; ids, targets (B, T) int64.

        mask    as in `hidden`
        """
        hidden = self.hidden(ids, mask).flatten(0, 1)
        return linear_cross_entropy(hidden, self.tokens.weight, self.output_bias, targets.flatten())


def build_model(config: Config, vocab_size: int) -> Transformer:
    """The model of `config` with weights that depend on `config.seed` alone."""
    torch.manual_seed(config.seed)
    return Transformer(config, vocab_size)


def parameters(model: Transformer) -> tuple[int, int]:
    """How many: dense ones, and those of the values on all ranks together."""
    dense = sum(p.numel() for group in model.groups().values() for p in group.values())
    values = (t.weight.numel() * (dist.world_size() if t.sharded else 1) for t in model.tables().values())
    return dense, sum(values)


def column_sharded(model: Transformer, tensors: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that the ranks share out by columns: sharded values and what their optimizer keeps of them."""
    sharded = [f".{name}." for name, table in model.tables().items() if table.sharded]
    return {name for name, tensor in tensors.items() if tensor.ndim == 2 and any(table in name for table in sharded)}
