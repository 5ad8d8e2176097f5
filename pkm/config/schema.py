"""The schema of a run: every setting, its unit and its default. `configs/base.yaml` shows the same as YAML.

A `Config` is frozen. What one setting alone can get wrong is checked by its type; what settings get wrong together
is the list `pkm.config.rules.IMPOSSIBLE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pkm.config import recipe
from pkm.config.load import Resolved
from pkm.config.load import load as load_file
from pkm.config.memory import Memories
from pkm.config.memory import MemoryConfig as MemoryConfig
from pkm.config.memory import QueryConfig as QueryConfig
from pkm.config.model import ExpertsConfig as ExpertsConfig
from pkm.config.model import ModelConfig as ModelConfig
from pkm.config.model import RotaryConfig as RotaryConfig
from pkm.config.optim import DenseOptim as DenseOptim
from pkm.config.optim import GroupOptim as GroupOptim
from pkm.config.optim import MatricesOptim as MatricesOptim
from pkm.config.optim import OptimConfig as OptimConfig
from pkm.config.optim import ValuesOptim as ValuesOptim
from pkm.config.part import Natural, Part, Positive, Rate, Where
from pkm.config.rules import impossible
from pkm.config.rules import impossible_for as impossible_for  # for who has a config at hand

NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]*(/[A-Za-z0-9][A-Za-z0-9._+=-]*)*$"
NAME_IN_WORDS = "letters, digits and any of . _ + = - (first a letter or digit), in parts separated by /"


class CorpusConfig(Part):
    """What is read."""

    path: Where
    """Prepared corpus: the directory that scripts/prepare.py wrote."""
    context: Positive = 256
    """Tokens of a window: what the model sees at once."""


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
