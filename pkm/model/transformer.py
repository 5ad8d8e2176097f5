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
from pkm.model.loss import linear_cross_entropy

LAYER_NORM_EPS = 1e-12  # XLM's


class Attention(nn.Module):
    """Causal self-attention over H heads: (B, T, d) -> (B, T, d)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if x.device.type == "cpu":  # where torch's way back takes twice as long in bf16
            q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (q, k, v))
        with torch.autocast("cpu", enabled=False):
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(heads.transpose(1, 2).reshape(batch, length, dim))


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
        self.dropout = nn.Dropout(config.model.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, d); mask (B, T) bool, True for tokens that are not padding, or None if none are."""
        x = self._sublayer(0, x, self.attention)
        residual = x
        x = self._sublayer(1, x, lambda h: self._feed_forward(h, mask, residual))
        if self.place == "after":
            after = x
            x = self._sublayer(2, x, lambda h: self._memory(h, mask, after))
        return x

    def _sublayer(self, i: int, x: Tensor, f) -> Tensor:  # type: ignore[no-untyped-def]
        norm = self.norms[i]
        return x + self.dropout(f(norm(x))) if self.pre_norm else norm(x + self.dropout(f(x)))

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
        self.context = config.corpus.context
        self.activation_checkpointing = False
        self.tokens = nn.Embedding(vocab_size, model.dim)
        self.positions = nn.Embedding(self.context, model.dim)
        self.embedding_norm = nn.LayerNorm(model.dim, eps=LAYER_NORM_EPS) if model.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(model.dropout)
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

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids (B, T) int64, T <= context -> hidden states (B, T, d) that the output layer reads.

        mask    (B, T) bool, True for tokens that are not padding; None if none are, as in training
        """
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            again = self.activation_checkpointing and self.training
            x = checkpoint(block, x, mask, use_reentrant=False) if again else block(x, mask)
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
