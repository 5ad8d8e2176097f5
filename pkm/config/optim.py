"""The section `optim`."""

from __future__ import annotations

from typing import Literal

from pkm.config.part import Decay, Natural, Part, Positive, Probability, Rate, Ratio, Share, Weight

Betas = tuple[Probability, Probability]
Schedule = Literal["inverse_sqrt", "cosine", "linear", "wsd", "constant"]


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
