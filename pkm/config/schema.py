"""The schema of a run: every setting, its unit and its default. `configs/base.yaml` shows the same as YAML.

A `Config` is frozen. What one setting alone can get wrong is checked by its type; what settings get wrong together
is the list `pkm.config.rules.IMPOSSIBLE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from pkm.config import recipe
from pkm.config.kinds import GATES, KEYS, READS, one_of
from pkm.config.load import Resolved
from pkm.config.load import load as load_file
from pkm.config.part import Natural, Part, Positive
from pkm.config.rules import impossible
from pkm.config.rules import impossible_for as impossible_for  # for who has a config at hand


def _in_fp32(number: float) -> float:
    if number and not 1e-38 <= number <= 3e38:
        raise ValueError(f"{number:g} is {'0' if number < 1 else 'infinite'} in fp32, in which models are updated")
    return number


def _finite_ratio(ratio: str) -> str:
    if not 1e-38 <= float(ratio.removesuffix("x")) <= 3e38:
        raise ValueError(f"{ratio} is no ratio of two learning rates: choose one above 0 that is not beyond fp32")
    return ratio


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_in_fp32)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_in_fp32)]
Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
"""Of a loss that is learned from beside the one that is told, whose weight is 1."""
RATIO = r"^(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?x$"
Ratio = Annotated[
    str,
    Field(pattern=RATIO, json_schema_extra={"patternErrorMessage": "a ratio to optim.dense.lr, as 15x"}),
    AfterValidator(_finite_ratio),
]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Betas = tuple[Probability, Probability]
Where = Annotated[Path, AfterValidator(Path.expanduser)]
Schedule = Literal["inverse_sqrt", "cosine", "linear", "wsd", "constant"]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]*(/[A-Za-z0-9][A-Za-z0-9._+=-]*)*$"
NAME_IN_WORDS = "letters, digits and any of . _ + = - (first a letter or digit), in parts separated by /"


class CorpusConfig(Part):
    """What is read."""

    path: Where
    """Prepared corpus: the directory that scripts/prepare.py wrote."""
    context: Positive = 256
    """Tokens of a window: what the model sees at once."""


class RotaryConfig(Part):
    """Rotary positions."""

    base: Rate = 10_000.0
    """The slowest pair turns by one over nearly so much a token, in radians; larger for longer contexts."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Which numbers of a head make a pair: 0 with size / 2 (Llama in transformers, Qwen, GPT-NeoX), or 0 with 1 (GPT-J)."""


class ExpertsConfig(Part):
    """A mixture of experts in place of feed-forward networks."""

    count: Positive
    """Experts of a block, E."""
    active: Positive = 2
    """Experts that a token is sent to."""
    at: tuple[Positive, ...] | None = None
    """Blocks whose feed-forward network they replace, counted from 1; null = all that have one."""
    ffn: Positive | None = None
    """Hidden width of an expert; null = the dense network's over `active`: as much work."""
    balance: Weight = 0.01
    """Weight of the loss that evens out the experts' load (Fedus et al., 2021)."""


class ModelConfig(Part):
    """The transformer. Its defaults are the paper's (docs/model.md says what is usual today)."""

    layers: Positive = 12
    """Transformer blocks, L."""
    dim: Positive = 1024
    """Width of the residual stream, d."""
    heads: Positive = 16
    """Attention heads; must divide dim."""
    kv_heads: Positive | None = None
    """Heads of keys and values, each for as many query heads (grouped-query attention); null = heads."""
    qk_norm: bool = False
    """A norm over each head's query and key, before they are turned."""
    window: Positive | None = None
    """Tokens that a token attends to at most, itself included (sliding window); null = all before it."""
    document_mask: bool = False
    """Attention stops where a document ends, and positions begin anew."""
    ffn: Positive | None = None
    """Hidden width of the feed-forward network; null = 4 * dim, for swiglu 8/3 * dim: as many parameters."""
    activation: Literal["gelu", "relu", "relu2", "swiglu"] = "gelu"
    """Of the feed-forward network; relu2 = relu squared."""
    experts: ExpertsConfig | None = None
    """Absent = dense feed-forward networks."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """Position embeddings, or queries and keys turned by their positions."""
    rotary: RotaryConfig = RotaryConfig()
    norm: Literal["post", "pre"] = "post"
    """A norm after each residual sum, as in the paper's code, or before each sublayer."""
    norm_type: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm, of all but the memories'."""
    norm_eps: Rate = 1e-12
    """Added to the variance before its root; XLM's, others' is 1e-5 or 1e-6."""
    embedding_norm: bool = True
    """A norm over the sum of the embeddings, as in the paper's code."""
    bias: bool = True
    """Biases of linear maps, LayerNorms and the output; the memories keep theirs."""
    tie_embeddings: bool = True
    """The output layer's weight is that of the token embeddings."""
    logit_cap: Rate | None = None
    """Soft cap c of the output's logits: c * tanh(logit / c); null = none."""
    dropout: Probability = 0.0
    """After embeddings, attention and feed-forward network, and on the attention weights."""


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


class DenseOptim(Part):
    """Adam of everything that no other group holds."""

    lr: Rate | Literal["auto"] = 2.5e-4
    """Peak learning rate; the other groups' may be given as a ratio to it. auto = by the model's width (docs/recipes.md)."""
    betas: Betas = (0.9, 0.98)
    """Adam's."""
    eps: Rate = 1e-8
    """Adam's."""
    weight_decay: Decay = 0.0
    """Decoupled (AdamW), on matrices only."""
    schedule: Schedule = "inverse_sqrt"
    """Learning rate as a function of the step."""
    floor: Share = 0.0
    """What the learning rate does not fall below after its warm-up, as a share of the peak."""
    cooldown: Share = 0.2
    """wsd: share of the steps, at the end, in which the rate falls from the peak to the floor."""
    warmup_steps: Natural = 4000
    """Linear warm-up."""
    clip: Rate | None = 5.0
    """Largest gradient norm of the group; null = no clipping."""
    implementation: Literal["torch", "apex"] = "torch"
    """Whose fused Adam updates the group; apex is NVIDIA's, where it is installed."""


class GroupOptim(Part):
    """Adam of a part of what is dense: a rate of its own, and whatever else is not to be as in `optim.dense`."""

    lr: Rate | Ratio | Literal["auto"] = "1x"
    """Peak learning rate: a number, a ratio to optim.dense.lr as 10x, or auto = by the model's width (docs/recipes.md)."""
    schedule: Schedule | None = None
    """Learning rate as a function of the step; null = optim.dense's."""
    floor: Share | None = None
    """What the learning rate does not fall below after its warm-up, as a share of the peak; null = optim.dense's."""
    cooldown: Share | None = None
    """wsd: share of the steps, at the end, in which the rate falls from the peak to the floor; null = optim.dense's."""
    warmup_steps: Natural | None = None
    """Linear warm-up; null = optim.dense's."""
    weight_decay: Decay | None = None
    """Decoupled (AdamW), on matrices only; null = optim.dense's."""
    clip: Rate | Literal["with dense"] | None = "with dense"
    """Largest gradient norm of the group; with dense = its gradient counts in optim.dense's norm and is scaled with it;
    null = no clipping."""


class MatricesOptim(GroupOptim):
    """Updates of the matrices of attention and feed-forward networks, if they are not to be as everything dense."""

    optimizer: Literal["adam", "muon"] = "adam"
    """muon (Jordan et al., 2024): momentum made orthogonal, at such a size that Adam's rates fit (Liu et al., 2025)."""
    momentum: Probability = 0.95
    """Muon's."""


class ValuesOptim(Part):
    """Adam of the memories' values."""

    lr: Rate | Ratio | Literal["auto"] = 1e-3
    """Peak learning rate: a number, a ratio to optim.dense.lr as 50x, or auto = by the model's width (docs/recipes.md)."""
    betas: Betas = (0.9, 0.999)
    """Adam's."""
    eps: Rate = 1e-8
    """Adam's."""
    weight_decay: Decay = 0.0
    """Decoupled (AdamW); with sparse updates of the rows that a step read alone."""
    schedule: Schedule = "constant"
    """Learning rate as a function of the step."""
    floor: Share = 0.0
    """What the learning rate does not fall below after its warm-up, as a share of the peak."""
    cooldown: Share = 0.2
    """wsd: share of the steps, at the end, in which the rate falls from the peak to the floor."""
    warmup_steps: Natural = 0
    """Linear warm-up."""
    clip: Rate | None = None
    """Largest gradient norm of the group; null = no clipping."""
    update: Literal["auto", "dense", "sparse", "in_backward"] = "auto"
    """dense: Adam over all slots. sparse: only the slots that were read move, and only their moments. in_backward: as sparse,
    while backward runs. auto = sparse."""
    dtype: Literal["auto", "fp32", "bf16", "bf16+master"] = "auto"
    """How values are kept: bf16 rounds stochastically; bf16+master reads bf16 and updates an fp32 copy. auto = bf16+master on a GPU
    that computes in bf16 or fp16, else fp32."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """How Adam's moments of the values are kept."""
    staleness: bool = False
    """Count for every row the steps since it was last read; 4 bytes a row, in checkpoints too."""


class OptimConfig(Part):
    """How long, on how much at a time, and by which updates the model learns."""

    steps: Positive
    """Updates of a run."""
    batch_tokens: Positive
    """Tokens of one update, over all ranks and accumulation; a multiple of the context."""
    micro_batch: Positive | None = None
    """Windows of one forward pass of one rank; null = all at once. Smaller means accumulation, in less memory."""
    dense: DenseOptim = DenseOptim()
    matrices: MatricesOptim | None = None
    """Absent = with optim.dense."""
    embeddings: GroupOptim = GroupOptim()
    """Of tokens, positions, and the output layer, tied or not."""
    addressing: GroupOptim = GroupOptim()
    """The memories' query networks and keys."""
    values: ValuesOptim = ValuesOptim()
    z_loss: Weight = 0.0
    """Weight of the squared logarithm of the softmax's denominator in the loss that is learned from; 1e-4 is usual."""
    max_consecutive_skips: Positive = 20
    """Steps skipped one after the other, because loss or gradient was not finite, that stop the run."""

    def group(self, name: str) -> DenseOptim | ValuesOptim:
        """Settings of `dense`, `matrices`, `embeddings`, `addressing` or `values` with every rate a number and nothing left to `dense`."""
        own = getattr(self, name)
        lr = float(own.lr.removesuffix("x")) * float(self.dense.lr) if isinstance(own.lr, str) else own.lr
        if not isinstance(own, GroupOptim):
            return own.model_copy(update={"lr": lr})
        given = {key: getattr(own, key) for key in ("schedule", "floor", "cooldown", "warmup_steps", "weight_decay")}
        given = {key: value for key, value in given.items() if value is not None}
        clip = self.dense.clip if own.clip == "with dense" else own.clip
        return self.dense.model_copy(update={**given, "lr": lr, "clip": clip})


class ProfileConfig(Part):
    from_step: Positive = 20
    """First step that is recorded."""
    steps: Positive = 3
    """Steps that are recorded, each into profile-STEP-rankR.json of the run directory (for Perfetto)."""


class ParallelConfig(Part):
    """How ranks share the work."""

    values: Literal["replicated", "sharded"] = "replicated"
    """Every rank holds the values whole, or each d/R columns of every slot."""
    sync_batch_norm: bool = True
    """The query's BatchNorm takes its statistics over the tokens of all ranks; false = of each rank alone."""
    activation_checkpointing: bool = False
    """Keep only each block's input for backward and compute the rest again: less memory, about a third more time."""


class CheckpointConfig(Part):
    """When a run is saved, and what is kept."""

    every_steps: Positive = 1000
    """Steps between checkpoints; one more is written at the end and when the run is told to stop."""
    keep: Positive = 3
    """Newest checkpoints that stay; the best one stays besides."""
    in_background: bool = False
    """Copy the tensors to the CPU's memory and write them while training goes on; it needs room there for the copy."""


class EvaluateConfig(Part):
    """When and on what a model is scored."""

    every_steps: Positive = 1000
    """Steps between evaluations on the validation split."""
    documents: Positive | None = 200
    """First documents of the validation split to evaluate on; null = all. The final report reads all of test."""
    test_documents: Positive | None = None
    """First documents of the test split that the report scores; null = all."""
    train_documents: Natural = 0
    """First documents of the training split that the report scores besides, to show how far the model fits its training text."""
    sample: Natural = 40
    """Tokens that the model writes at each evaluation, going on from the validation text's beginning; 0 = none."""
    facts: Natural = 0
    """Names, places and numbers that the report asks the model for besides: a third of articles that it never read, a third read
    once, a third more often; 0 = none, 3000 tells models apart."""
    stride: Positive | None = None
    """Tokens a window moves on; null = context, so that windows do not overlap."""
    batch: Positive = 16
    """Windows of one forward pass."""


class WandbConfig(Part):
    """Records sent to Weights & Biases too, where it is installed."""

    project: str = "pkm"
    """Where the run is filed."""
    entity: str | None = None
    """User or team; null = who is logged in."""
    group: str | None = None
    """What the run is grouped with, as the seeds of a model."""
    mode: Literal["online", "offline"] = "online"
    """offline: write it into the run's directory, for `wandb sync`."""


class MlflowConfig(Part):
    """Records sent to MLflow too, where it is installed."""

    uri: str | None = None
    """Server or folder; null = MLFLOW_TRACKING_URI, else the folder `mlruns` below `runs`."""
    experiment: str = "pkm"
    """Where the run is filed."""


class LogConfig(Part):
    """What is written while a run goes on."""

    every_steps: Positive = 10
    """Steps between log lines."""
    tensorboard: bool = True
    """Write event files beside metrics.jsonl."""
    wandb: WandbConfig | None = None
    """Send the records to Weights & Biases; null = no, {} = as its defaults say."""
    mlflow: MlflowConfig | None = None
    """Send the records to MLflow; null = no, {} = as its defaults say."""


class Config(Part):
    """A run, whole."""

    name: Annotated[str, Field(pattern=NAME, json_schema_extra={"patternErrorMessage": NAME_IN_WORDS})]
    """The run's directory below `runs`."""
    runs: Where = Path("runs")
    """Where run directories are made."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Of initialisation, data order and dropout."""
    init_from: Where | None = None
    """A trained model whose weights the run begins with: a run, an export, or a directory of transformers. Memories that it
    has not are new, with values of zero where values_std is null; null = random weights."""
    corpus: CorpusConfig
    model: ModelConfig = ModelConfig()
    memory: Memories | None = None
    """Absent = a dense model. A list of such sections = memories of several kinds, each kind at layers of its own; on the
    command line memory.knn=8 is for all of them, memory.0.knn=8 for the first."""
    optim: OptimConfig
    max_minutes: Rate | None = None
    """Save and stop in time to be done after so many minutes, as a cluster's time limit asks; null = no limit. Counted from
    where training begins, or under torchrun from its start: ranks that it starts again have what is left."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Of matrix products; auto = bf16 on GPUs and CPUs that have it, else fp32. tf32 = fp32 with a GPU's shorter products."""
    compile: bool = False
    """torch.compile the blocks: faster after a minute or more at the start."""
    profile: ProfileConfig | None = None
    """Record some steps with torch's profiler; null = none."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto = cuda, mps, cpu: the first there is."""
    threads: Positive | None = None
    """CPU threads of a rank; null = torch's choice. Results repeat bit by bit only for the same number."""
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _decide_rates(self) -> Config:
        """Put numbers in place of `lr: auto`, so that a run keeps its rates whatever a later version makes of the word."""
        rates, optim = recipe.learning_rates(self.model.dim), self.optim
        for name, rate in {**rates, "matrices": rates["dense"]}.items():
            group = getattr(optim, name)
            if group is not None and group.lr == "auto":
                optim = optim.model_copy(update={name: group.model_copy(update={"lr": rate})})
        self.__dict__["optim"] = optim  # frozen for everyone else
        return self

    @property
    def directory(self) -> Path:
        return self.runs / self.name

    @property
    def sequences(self) -> int:
        """Windows of one update, over all ranks and accumulation."""
        return self.optim.batch_tokens // self.corpus.context

    @property
    def ffn(self) -> int:
        """Hidden width of a feed-forward network: 4 d, or of three matrices in place of two 8/3 d, to the nearest multiple of 8."""
        if self.model.ffn:
            return self.model.ffn
        return max(1, round(self.model.dim / 3)) * 8 if self.model.activation == "swiglu" else 4 * self.model.dim

    @property
    def expert_ffn(self) -> int:
        """Hidden width of one expert; 0 without experts."""
        experts = self.model.experts
        return 0 if experts is None else experts.ffn or max(1, self.ffn // experts.active)

    @property
    def feed_forward_layers(self) -> tuple[int, ...]:
        """Blocks with a feed-forward network, dense or of experts, counted from 1."""
        replaced = {layer for m in self.memories if m.place == "replace" for layer in self.layers_of(m)}
        return tuple(layer for layer in range(1, self.model.layers + 1) if layer not in replaced)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Blocks whose feed-forward network is a mixture of experts, counted from 1."""
        experts = self.model.experts
        if experts is None:
            return ()
        return self.feed_forward_layers if experts.at is None else experts.at

    @property
    def memories(self) -> tuple[MemoryConfig, ...]:
        """The sections of `memory`; empty for a dense model."""
        if self.memory is None:
            return ()
        return self.memory if isinstance(self.memory, tuple) else (self.memory,)

    def layers_of(self, memory: MemoryConfig) -> tuple[int, ...]:
        """Blocks that hold a memory of this section, counted from 1."""
        if memory.layers is not None:
            return memory.layers
        interval = memory_interval(self.model.layers, memory.count or 0)
        return tuple(interval * (i + 1) for i in range(memory.count or 0))

    def memories_at(self, layer: int) -> dict[str, MemoryConfig]:
        """What a block, counted from 1, holds: `memory`, and by their places what the list names after it."""
        here = [m for m in self.memories if layer in self.layers_of(m)]
        return {f"memory_{m.place}" if i else "memory": m for i, m in enumerate(here)}

    @property
    def memory_layers(self) -> tuple[int, ...]:
        """The block of every memory, counted from 1, ascending: one that holds two is there twice; empty for a dense model."""
        return tuple(sorted(layer for m in self.memories for layer in self.layers_of(m)))

    @property
    def slots(self) -> int:
        """Slots of one memory, K; where they differ, those of the first that `memory` names."""
        return self.memories[0].size if self.memories else 0


def memory_interval(layers: int, count: int) -> int:
    """Blocks from one memory to the next (paper 4.3: L=16, N=2 gives 6 and 12)."""
    return math.ceil(layers / (count + 1))


def load(path: Path | str, overrides: Sequence[str] = ()) -> Resolved[Config]:
    """A run's config from its file and `a.b=value` arguments. Raises UserErrors with every mistake in them."""
    return load_file(path, overrides, Config, impossible)
