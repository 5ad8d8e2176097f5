"""The transformer, with product-key memories where the config puts them (paper 4, figure 3).

Shapes: B windows, T tokens of context, d model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pkm.config.schema import Config, MemoryConfig, ModelConfig
from pkm.corpus.store import OtherVocab
from pkm.distributed import dist
from pkm.memory.layer import MemoryLayer
from pkm.memory.ngram import Back, NgramKeys, looking_back
from pkm.memory.values import Values, tables
from pkm.model.attention import Attention, Past, Places, build_norm, token_places
from pkm.model.dropout import dropout as drop
from pkm.model.experts import Experts
from pkm.model.loss import linear_cross_entropy
from pkm.text.canonical import canonical_ids
from pkm.text.vocab import PAD_ID, Vocab

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "swiglu": F.silu,
}  # fmt: skip

MemoryName = int | str
"""5, or "5 beside" of a second memory in block 5."""


class FeedForward(nn.Module):
    """Two linear maps with an activation between: (B, T, d) -> (B, T, d).

    swiglu (Shazeer, 2020) has a third, the gate, whose activation the expanded numbers are multiplied with.
    """

    def __init__(self, config: ModelConfig, hidden: int):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.expand = nn.Linear(config.dim, hidden, bias=config.bias)
        self.contract = nn.Linear(hidden, config.dim, bias=config.bias)
        self.gate = nn.Linear(config.dim, hidden, bias=config.bias) if config.activation == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.contract(self.activation(self.gate(x)) * self.expand(x))
        return self.contract(self.activation(self.expand(x)))


class Block(nn.Module):
    """Attention, then a feed-forward network, a memory, or both; each sublayer in a residual sum with a norm.

    post-norm (XLM): x <- norm(x + f(x));  pre-norm: x <- x + f(norm(x)). A memory of n-grams before all: x <- x + m(x).

    skip    after how many more blocks the output of a memory beside the feed-forward network joins the stream (UltraMem, 2024);
            0 = here
    """

    def __init__(self, config: Config, layer: int, first: dict[MemoryConfig, MemoryLayer]):
        """layer    counted from 1: it says which memories and experts the block holds
        first    of each section whose memories share their tables, the memory that holds them; it grows
        """
        super().__init__()
        dim, memories = config.model.dim, config.memories_at(layer)
        self.names: dict[str, str] = {m.place: name for name, m in memories.items()}
        self.skip = max((m.skip for m in memories.values()), default=0)
        self.pre_norm = config.model.norm == "pre"
        self.attention = Attention(config.model)
        self.feed_forward: FeedForward | Experts | None = None
        if layer in config.expert_layers:
            self.feed_forward = Experts(config, ACTIVATIONS[config.model.activation])
        elif "replace" not in self.names:
            self.feed_forward = FeedForward(config.model, config.ffn)
        self.memory: MemoryLayer | None = None
        for name, m in memories.items():
            memory = MemoryLayer(m, dim, first.get(m), config.layers_of(m).index(layer), layer)
            memory.begin(m, dim, config.model.layers, config.ffn)
            setattr(self, name, memory)
            if m.share_values:
                first.setdefault(m, memory)
        self.norms = nn.ModuleList(build_norm(config.model, dim) for _ in range(3 if "after" in self.names else 2))
        self.dropout = config.model.dropout

    def forward(
        self, x: Tensor, mask: Tensor | None, places: Places, past: Past | None = None, layer: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, T, d) -> (B, T, d), and what is to `join` it later, if anything is.

        mask    (B, T) bool, True for tokens that are not padding, or None if none are; the rest as Attention's
        """
        back = places.back
        if "before" in self.names:
            x = x + drop(self._memory("before", x, mask, x, back), self.dropout, self.training)
        x = self._sublayer(0, x, lambda h: self.attention(h, places, past, layer))
        late = None
        if self.skip:
            late = self._at("beside")(self.norms[1](x) if self.pre_norm else x, mask, back)
        residual = x
        x = self._sublayer(1, x, lambda h: self._feed_forward(h, mask, residual, back))
        if "after" in self.names:
            after = x
            x = self._sublayer(2, x, lambda h: self._memory("after", h, mask, after, back))
        return x, late

    def join(self, x: Tensor, late: Tensor) -> Tensor:
        """The stream (B, T, d) `skip` blocks later, with what this block's memory gave."""
        self._measure("beside", late, x)
        return x + drop(late, self.dropout, self.training)

    def _sublayer(self, i: int, x: Tensor, f) -> Tensor:  # type: ignore[no-untyped-def]
        norm = self.norms[i]
        y = drop(f(norm(x) if self.pre_norm else x), self.dropout, self.training)
        return x + y if self.pre_norm else norm(x + y)

    def _feed_forward(self, x: Tensor, mask: Tensor | None, residual: Tensor, back: Back | None = None) -> Tensor:
        if self.feed_forward is None:
            y = self._memory("replace", x, mask, residual, back)
        else:
            y = self.feed_forward(x, mask) if isinstance(self.feed_forward, Experts) else self.feed_forward(x)
        if "beside" in self.names and not self.skip:
            y = y + self._memory("beside", x, mask, residual, back)
        return y

    def _memory(self, place: str, x: Tensor, mask: Tensor | None, residual: Tensor, back: Back | None) -> Tensor:
        y: Tensor = self._at(place)(x, mask, back)
        self._measure(place, y, residual)
        return y

    def _at(self, place: str) -> MemoryLayer:
        memory: MemoryLayer = getattr(self, self.names[place])
        return memory

    def _measure(self, place: str, y: Tensor, residual: Tensor) -> None:
        memory = self._at(place)
        if memory.record:
            memory.squares = y.detach().float().square().mean(), residual.detach().float().square().mean()


class Transformer(nn.Module):
    """A causal language model: ids -> the next id's log-probabilities.

    Embeddings of tokens (tied with the output, which adds a bias) and of learned positions, a LayerNorm over their sum
    as in XLM, the blocks, and with pre-norm one more norm before the output. What else each can be: `ModelConfig`.

    activation_checkpointing    in training keep only each block's input, and run it again in backward
    canonical                   (V,) int64, where there are n-gram memories: ids that read alike have one number
    """

    canonical: Tensor

    def __init__(self, config: Config, vocab_size: int, vocab: Vocab | OtherVocab | None = None):
        """vocab    whose ids these are; without a Vocab, whose pieces are known, every id is its own canonical one"""
        super().__init__()
        self.config = model = config.model
        self.context, self.z_loss = config.corpus.context, config.optim.z_loss
        self.activation_checkpointing = False
        self.tokens = nn.Embedding(vocab_size, model.dim)
        self.positions = nn.Embedding(self.context, model.dim) if model.positions == "learned" else None
        self.embedding_norm = build_norm(model, model.dim) if model.embedding_norm else nn.Identity()
        first: dict[MemoryConfig, MemoryLayer] = {}
        blocks = nn.ModuleList(Block(config, layer, first) for layer in range(1, model.layers + 1))
        self.blocks = cast(Sequence[Block], blocks)  # a ModuleList does not say of what
        self.longest = max((order for m in config.memories if m.keys == "ngram" for order in m.orders), default=0)
        if self.longest:
            found = torch.from_numpy(canonical_ids(vocab)) if isinstance(vocab, Vocab) else torch.arange(vocab_size)
            self.register_buffer("canonical", found)
            for _, memory in self.memories():
                if isinstance(memory.keys, NgramKeys):
                    memory.keys.know(int(found.max()) + 1)
        self.final_norm = build_norm(model, model.dim) if model.norm == "pre" else nn.Identity()
        self.output = None if model.tie_embeddings else nn.Embedding(vocab_size, model.dim)
        self.output_bias = nn.Parameter(torch.zeros(vocab_size)) if model.bias else None
        for embedding in self.embeddings():
            nn.init.normal_(embedding.weight, std=model.dim**-0.5)

    def embeddings(self) -> list[nn.Embedding]:
        """Of tokens, positions and the output: those that there are."""
        return [table for table in (self.tokens, self.positions, self.output) if table is not None]

    @property
    def output_weight(self) -> Tensor:
        """(V, d)."""
        return (self.output or self.tokens).weight

    def memories(self) -> Iterator[tuple[MemoryName, MemoryLayer]]:
        """(name, memory), in order: the layer counted from 1, and of a further one in a block the layer and its place."""
        for layer, block in enumerate(self.blocks, start=1):
            for place, name in block.names.items():
                yield layer if name == "memory" else f"{layer} {place}", getattr(block, name)

    def memory(self, name: MemoryName) -> MemoryLayer:
        """The memory of this name."""
        return dict(self.memories())[name]

    def experts(self) -> Iterator[tuple[int, Experts]]:
        """(layer counted from 1, its mixture of experts), in order."""
        for layer, block in enumerate(self.blocks, start=1):
            if isinstance(block.feed_forward, Experts):
                yield layer, block.feed_forward

    def tables(self) -> dict[str, Values]:
        """Every table of values by its name in the model, once, however many layers read it."""
        return tables(self)

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """All other parameters by group and name: dense, embeddings (the output layer's too, tied or not), addressing."""
        of_tables = {id(table.weight) for table in self.tables().values()}
        of = {id(p): "embeddings" for table in self.embeddings() for p in table.parameters()}
        of |= {id(p): "addressing" for _, memory in self.memories() for p in memory.addressing()}
        groups: dict[str, dict[str, nn.Parameter]] = {"dense": {}, "embeddings": {}, "addressing": {}}
        for name, p in self.named_parameters():
            if id(p) not in of_tables:
                groups[of.get(id(p), "dense")][name] = p
        return {group: parameters for group, parameters in groups.items() if parameters}

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, past: Past | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """ids (B, T) int64, T <= context -> hidden states (B, T, d) that the output layer reads.

        mask         (B, T) bool, True for tokens that are not padding; None if none are, as in training
        past         of the tokens before these, which it then holds besides: T tokens if it is empty, else 1
        documents    (B, T) int64, ascending: the document that each token is of, where attention is to stop at its end
        """
        first = 0 if past is None else past.length
        positions, places = token_places(self.config, ids.shape[1], first, documents, ids.device)
        if self.longest:
            places = places._replace(back=self._looking_back(ids, positions, past, documents))
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = drop(self.embedding_norm(x), self.config.dropout, self.training)
        waiting: dict[int, list[tuple[Block, Tensor]]] = {}  # by the block after which they join
        for layer, block in enumerate(self.blocks):
            if past is not None:
                x, late = block(x, mask, places, past, layer)
            elif self.activation_checkpointing and self.training:
                x, late = checkpoint(block, x, mask, places, use_reentrant=False)
            else:
                x, late = block(x, mask, places)
            if late is not None:
                waiting.setdefault(layer + block.skip, []).append((block, late))
            for earlier, late in waiting.pop(layer, ()):
                x = earlier.join(x, late)
        if past is not None:
            past.length += ids.shape[1]
        return self.final_norm(x)

    def _looking_back(self, ids: Tensor, positions: Tensor, past: Past | None, documents: Tensor | None) -> Back:
        """What n-gram memories know of the tokens before these; `past` remembers what the next ones need of them."""
        own = self.canonical[ids]
        before = past.recent if past is not None and past.length else None
        back = looking_back(own, self.longest, self.canonical[PAD_ID], before, documents)
        if past is None:
            return Back(back, positions)
        past.recent = back[:, -1, : self.longest - 1].flip(-1)
        if past.length == 0:
            past.convolved.clear()
        return Back(back, positions, past.convolved)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) -> (..., V)."""
        logits = F.linear(hidden, self.output_weight, self.output_bias)
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(
        self, ids: Tensor, targets: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Negative log-likelihood in nats, fp32, summed over the targets that are not IGNORE; ids, targets (B, T) int64.

        mask, documents    as in `hidden`
        """
        hidden, z = self.hidden(ids, mask, documents=documents).flatten(0, 1), self.z_loss if self.training else 0.0
        loss = linear_cross_entropy(
            hidden, self.output_weight, self.output_bias, targets.flatten(), self.config.logit_cap, z
        )
        for extra in self._extra_losses(ids.numel()) if self.training else ():
            loss = loss + (extra - extra.detach())  # in the gradient, not in what is told
        return loss

    def _extra_losses(self, tokens: int) -> Iterator[Tensor]:
        """What is learned from besides, summed over the tokens."""
        for _, experts in self.experts():
            if experts.balance is not None:
                yield experts.balance
        for _, memory in self.memories():
            of_keys = memory.loss()
            if of_keys is not None:
                yield tokens * of_keys


def build_model(config: Config, vocab_size: int, vocab: Vocab | OtherVocab | None = None) -> Transformer:
    """The model of `config` with weights that depend on `config.seed` alone; `vocab` as in Transformer."""
    torch.manual_seed(config.seed)
    return Transformer(config, vocab_size, vocab)


def parameters(model: Transformer) -> tuple[int, int]:
    """How many: dense ones, and those of the values on all ranks together."""
    dense = sum(p.numel() for group in model.groups().values() for p in group.values())
    values = (t.weight.numel() * (dist.world_size() if t.sharded else 1) for t in model.tables().values())
    return dense, sum(values)


def column_sharded(model: Transformer, tensors: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that the ranks share out by columns: sharded values and what their optimizer keeps of them."""
    sharded = [f".{name}." for name, table in model.tables().items() if table.sharded]
    return {name for name, tensor in tensors.items() if tensor.ndim == 2 and any(table in name for table in sharded)}
