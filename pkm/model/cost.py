"""Parameters, FLOPs and bytes of a config, worked out before anything is built. Imports no torch.

Letters as in the paper: V vocabulary, T context, L blocks, d width, f feed-forward width; for a memory H heads, K slots,
C sub-keys a side, k selected slots, q query size, M memories. What the parts of a memory cost: pkm.memory.cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from pkm.config.schema import Config, MemoryConfig
from pkm.memory import cost as of_memory
from pkm.memory.cost import FP32, summed

PAPER_VOCABULARY = 60_014
"""BPE splits of the paper, and 14 special ids; what is counted with as long as there is no prepared corpus."""
CHUNK_LOGITS = 2**28
"""Logits that exist at a time (pkm.model.loss, which needs torch)."""
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "bf16+master": 6, "auto": 4}
"""`auto` of values: where nobody said what it is on the machine (pkm.device.settled)."""


def planned_precision(config: Config) -> str:
    """What is counted with: `auto` is bf16 on a GPU, else fp32. Who knows the machine says so (pkm.device.settled)."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if config.device == "cuda" else "fp32"


@dataclass(frozen=True)
class Parameters:
    tokens: int
    """V x d, tied with the output layer or not."""
    positions: int
    """T x d, if they are learned."""
    output_bias: int
    """V. This and all biases below: if there are any."""
    attention: int
    """L x (d x (d + 2 kv) + (d + 2 kv) + d x d + d), kv = d, or what fewer heads of keys and values have together; norms over
    one head's query and key besides, if there are any."""
    feed_forward: int
    """d x f + f + f x d + d, of the blocks that have one; a gate d x f + f more."""
    norms: int
    """LayerNorms: weight and bias (2d) of the embeddings', two or three of a block, one at the end with pre-norm; RMSNorms
    have no bias."""
    query: int
    """The memories' query networks with the normalisation on top."""
    keys: int
    """Product: H x 2 x C x q/2; flat: H x K x q; of every memory."""
    values: int
    """M x K x d; a table that several memories share counts once."""
    read: int = 0
    """What the memories' reads and outputs learn besides the values."""
    experts: int = 0
    """Of each block that has them: the router d x E, and E times d x f + f x d (a gate d x f more), f of an expert."""
    output: int = 0
    """V x d, if the output layer's weight is one of its own."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def dense(self) -> int:
        """Everything but the values: what `optim.dense` updates."""
        return self.total - self.values


def parameters(config: Config, vocab_size: int) -> Parameters:
    """Parameters of the model that `config` describes, part by part."""
    model = config.model
    d, f, blocks, bias = model.dim, config.ffn, model.layers, int(model.bias)
    after = sum(len(config.layers_of(m)) for m in config.memories if m.place == "after")
    norms = model.embedding_norm + 2 * blocks + (model.norm == "pre") + after
    norm = 1 + (bias if model.norm_type == "layer" else 0)  # numbers for each one that is normalised
    qkv = d + 2 * _kv(config)
    attention = (qkv * d + bias * qkv) + (d * d + bias * d) + (2 * norm * (d // model.heads) if model.qk_norm else 0)
    return Parameters(
        tokens=vocab_size * d,
        positions=config.corpus.context * d if model.positions == "learned" else 0,
        output_bias=bias * vocab_size,
        attention=blocks * attention,
        feed_forward=_feed_forwards(config) * (_expansions(config) * (d * f + bias * f) + (f * d + bias * d)),
        norms=norms * norm * d,
        query=_of_memories(config, lambda m: of_memory.query(m, d).parameters),
        keys=_of_memories(config, lambda m: of_memory.keys(m, d).parameters),
        values=sum(of_memory.table_rows(m, len(config.layers_of(m))) * of_memory.row(m, d) for m in config.memories),
        read=_of_memories(config, lambda m: sum(of(m, d).parameters for of in (of_memory.read, of_memory.output))),
        experts=len(config.expert_layers) * _experts(config, model.experts.count) if model.experts else 0,
        output=0 if model.tie_embeddings else vocab_size * d,
    )


def _kv(config: Config) -> int:
    """Numbers of a token's keys in one block, and of its values."""
    return config.model.dim // config.model.heads * (config.model.kv_heads or config.model.heads)


def _expansions(config: Config) -> int:
    """Matrices of a feed-forward network that widen: with a gate there are two."""
    return 2 if config.model.activation == "swiglu" else 1


def _of_memories(config: Config, of: Callable[[MemoryConfig], int]) -> int:
    """The sum over all memories of what one of a section has."""
    return sum(len(config.layers_of(memory)) * of(memory) for memory in config.memories)


def _of_tables(config: Config, of: Callable[[MemoryConfig, int], int]) -> int:
    """The sum over all tables of what one of a section has; `of` is told how many memories read it."""
    every = ((m, len(config.layers_of(m))) for m in config.memories)
    return sum(of(m, count) if m.share_values else count * of(m, 1) for m, count in every)


def _feed_forwards(config: Config) -> int:
    """Blocks with a dense one."""
    return len(config.feed_forward_layers) - len(config.expert_layers)


def _experts(config: Config, number: int) -> int:
    """Numbers of a block's router and of so many of its experts."""
    assert config.model.experts is not None
    d = config.model.dim
    return d * config.model.experts.count + number * (_expansions(config) + 1) * d * config.expert_ffn


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token. A multiply-add is two; what is no product of matrices (normalisation,
    softmax, activations, top-k, the look-up of embeddings, the optimizer) is not counted."""

    attention: int
    """L x (8 d^2 + 2 d (T + 1)): four d x d maps; scores and weighted sum over the (T + 1) / 2 tokens that a token sees
    on average. Fewer heads of keys and values make two of the maps smaller, a window the second part; where documents
    end is not known here."""
    feed_forward: int
    """4 d f, of the blocks that have one, 6 d f with a gate; of experts those that a token is sent to, and 2 d E of the router."""
    output: int
    """2 V d."""
    query: int
    """2 H x the products of neighbouring widths of a head's query network."""
    search: int
    """Scores of all keys. Product: 2 H C q; flat: 2 H K q."""
    read: int
    """Weighted sum of the selected values: 2 H k d; and what becomes of it."""
    search_backward: int
    """Gradients of scores reach only the k selected slots of a head: 4 H k q, for queries and keys together."""

    @property
    def forward(self) -> int:
        return self.attention + self.feed_forward + self.output + self.query + self.search + self.read

    @property
    def training(self) -> int:
        """Forward and backward. The backward of a product of matrices is two such products."""
        return 3 * (self.forward - self.search) + self.search + self.search_backward


def flops(config: Config, vocab_size: int) -> Flops:
    """FLOPs per token of the model that `config` describes."""
    d, context = config.model.dim, config.corpus.context
    window = min(config.model.window or context, context)
    seen = context * (context + 1) - (context - window) * (context - window + 1)  # twice the pairs of a window of text
    experts = config.model.experts
    of_experts = len(config.expert_layers) * 2 * _experts(config, experts.active) if experts else 0
    return Flops(
        attention=config.model.layers * (4 * d * (d + _kv(config)) + 2 * d * seen // context),
        feed_forward=_feed_forwards(config) * 2 * (_expansions(config) + 1) * d * config.ffn + of_experts,
        output=2 * vocab_size * d,
        query=_of_memories(config, lambda m: of_memory.query(m, d).flops),
        search=_of_memories(config, lambda m: of_memory.keys(m, d).flops),
        read=_of_memories(config, lambda m: sum(of(m, d).flops for of in (of_memory.read, of_memory.output))),
        search_backward=_of_memories(config, lambda m: of_memory.keys(m, d).backward),
    )


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of one rank in training."""

    weights: int
    gradients: int
    """Dense fp32; of the values, whole for `update: dense`, else the rows that an update can touch at most."""
    adam: int
    """Two moments of everything; of matrices that Muon updates one."""
    activations: int
    """An estimate of what backward keeps (see `activation_bytes`)."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.adam + self.activations


def _once_kept(config: Config) -> int:
    """Numbers of the matrices of which Muon keeps the momentum alone."""
    matrices = config.optim.matrices
    if matrices is None or matrices.optimizer != "muon":
        return 0
    d = config.model.dim
    attention = config.model.layers * d * (2 * d + 2 * _kv(config))
    return attention + _feed_forwards(config) * (_expansions(config) + 1) * d * config.ffn


def bytes_per_slot(config: Config, memory: MemoryConfig) -> int:
    """Bytes of one slot: its value and Adam's two moments."""
    values = config.optim.values
    return of_memory.row(memory, config.model.dim) * (BYTES[values.dtype] + 2 * BYTES[values.state_dtype])


def training_bytes(config: Config, vocab_size: int, ranks: int = 1) -> TrainingBytes:
    """Bytes of one of `ranks` processes."""
    count = parameters(config, vocab_size)
    values = config.optim.values
    share = ranks if config.parallel.values == "sharded" else 1
    windows = -(-config.sequences // ranks)
    at_once = min(config.optim.micro_batch or windows, windows)
    tokens = windows * config.corpus.context * share

    def touched(m: MemoryConfig, readers: int) -> int:
        return of_memory.touched_rows(m, readers * tokens) * (of_memory.row(m, config.model.dim) * FP32 // share + 8)

    value_gradients = count.values // share * FP32 if values.update == "dense" else _of_tables(config, touched)
    return TrainingBytes(
        weights=count.dense * FP32 + count.values // share * BYTES[values.dtype],
        gradients=count.dense * FP32 + value_gradients,
        adam=(count.dense * 2 - _once_kept(config)) * FP32 + count.values // share * 2 * BYTES[values.state_dtype],
        activations=activation_bytes(config, vocab_size, at_once * config.corpus.context),
    )


def activation_bytes(config: Config, vocab_size: int, tokens: int) -> int:
    """About what a forward pass over `tokens` tokens keeps for backward; temporary buffers come on top.

    per token, with a bytes for what products of matrices take and give, 4 for what stays in fp32:
    block         d of: input, q, heads' output, the feed-forward network's input (a); both residual sums (4); k and v (a);
                  q and k once more, where they are normalised, and where they are turned (4)
    feed-forward  f after the activation (a), before it if that is GELU, f of ReLU that is squared; three more with a gate
    memory        what its parts keep
    With activation checkpointing only the blocks' inputs and what the largest block keeps while it is done again.

    Dropout keeps its masks besides, and on a CPU the attention weights; neither is counted.

    once: the dense weights in lower precision; the output layer's gradient; one chunk of logits and their errors.
    """
    a, d = BYTES[planned_precision(config)], config.model.dim
    changed = config.model.qk_norm + (config.model.positions == "rotary")
    block = d * (4 * a + 2 * FP32) + 2 * _kv(config) * a + changed * (d + _kv(config)) * FP32
    feed_forward = {"relu": 1, "gelu": 2, "relu2": 2, "swiglu": 4}[config.model.activation] * config.ffn * a
    kept = [of_memory.kept_bytes(m, d, a) for m in config.memories]
    experts = 0
    if config.model.experts:
        # For each choice: what goes in and comes out, and what is between; for each expert its probability.
        between = feed_forward // config.ffn * config.expert_ffn
        experts = config.model.experts.active * (2 * d * a + between) + config.model.experts.count * FP32
    if config.parallel.activation_checkpointing:
        token = config.model.layers * d * FP32 + block + max(feed_forward, experts) + max(kept, default=0)
    else:
        token = config.model.layers * block + _of_memories(config, lambda m: of_memory.kept_bytes(m, d, a))
        token += _feed_forwards(config) * feed_forward + len(config.expert_layers) * experts
    copies = parameters(config, vocab_size).dense * a if a < FP32 else 0
    logits = min(tokens * vocab_size, CHUNK_LOGITS) * a
    return tokens * (token + d * a) + copies + vocab_size * d * FP32 + logits


def numbers_made(config: Config, vocab_size: int) -> int:
    """Numbers that a step computes, about: what backward keeps, and all that its memories' reads take out of tables."""
    tokens = config.optim.batch_tokens
    kept = activation_bytes(config, vocab_size, tokens) // BYTES[planned_precision(config)]
    return kept + tokens * _of_memories(config, lambda m: m.reads * of_memory.row(m, config.model.dim))


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others in one update. Of R ranks, a sum of n bytes takes 2 n (R - 1) / R, as a ring."""

    dense: int
    """Gradients of everything but the values, once an update: 4 bytes each, summed."""
    batch_norm: int
    """Mean and variance of the H q query features, summed, and their gradients back, in every micro-batch; with
    `sync_batch_norm: false` the running ones, once an update."""
    values: int
    """With N tokens of a rank in an update, J = H k reads of a token, a bytes of a product's result; for each memory,
    replicated  K bytes that say which rows were read, and the gradient of those rows (at most min(K, R N J)) summed;
                the whole table's for `update: dense`
    sharded     N J indices and weights to each other rank, and the weights' gradients back; N d / R outputs to each other
                rank, and their gradients back."""

    @property
    def total(self) -> int:
        return self.dense + self.batch_norm + self.values


def traffic(config: Config, vocab_size: int, ranks: int) -> Traffic:
    """Of an update in which no two ranks read the same row, which is the most that replicated values can send."""
    d = config.model.dim
    windows = config.sequences // ranks
    micro_batches = -(-windows // min(config.optim.micro_batch or windows, windows)) if windows else 0
    forwards = 2 if config.parallel.activation_checkpointing else 1

    dense = summed(parameters(config, vocab_size).dense * FP32, ranks)

    def norm(m: MemoryConfig) -> int:
        size = of_memory.statistics(m)
        if size and config.parallel.sync_batch_norm:
            return micro_batches * summed(forwards * (size + FP32) + size, ranks)
        return size

    tokens = windows * config.corpus.context

    def replicated(m: MemoryConfig, readers: int) -> int:
        return of_memory.sent_replicated(m, d, readers * tokens, ranks, config.optim.values.update == "dense")

    def sharded(m: MemoryConfig) -> int:
        return of_memory.sent_sharded(m, d, tokens, ranks, BYTES[planned_precision(config)], forwards)

    norms = _of_memories(config, norm)
    if not config.parallel.sync_batch_norm:
        norms = summed(norms, ranks)
    shards = config.parallel.values == "sharded"
    return Traffic(dense, norms, _of_memories(config, sharded) if shards else _of_tables(config, replicated))


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Tensors of one checkpoint: weights and Adam's moments (running statistics of BatchNorm are kilobytes)."""
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"values": "replicated"})})
    needed = training_bytes(whole, vocab_size)
    return needed.weights + needed.adam
