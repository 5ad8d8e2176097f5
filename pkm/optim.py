"""Two optimizers of one run: Adam for everything dense, and the values' own (paper 4.3).

Learning rates are functions of the step, never of a counter, so that a resumed run needs none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pkm import dist
from pkm.config import DenseOptim, OptimConfig, ValuesOptim
from pkm.errors import UserError
from pkm.memory.adam import ValuesAdam
from pkm.memory.ranks import sum_gradient
from pkm.model import Transformer


def learning_rate(settings: DenseOptim | ValuesOptim, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 1) of `steps`.

    A linear warm-up to the peak at `warmup_steps`, then
    inverse_sqrt  peak * sqrt(warmup / step)      (Vaswani et al., 2017; paper 4.3)
    cosine        peak to zero at `steps`, half a period
    linear        peak to zero at `steps`
    constant      peak
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * step / warmup
    if settings.schedule == "inverse_sqrt":
        return settings.lr * math.sqrt(max(warmup, 1) / step)
    remaining = max(steps - step, 0) / max(steps - warmup, 1)
    if settings.schedule == "linear":
        return settings.lr * remaining
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1 - math.cos(math.pi * remaining))
    return settings.lr


class DenseAdam:
    """AdamW over named parameters; weight decay on matrices only.

    Gradients are left in `.grad` by backward. `state_tensors` names the moments after their parameters, so that a
    checkpoint can be read without the order in which the parameters were registered, and by either implementation.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], settings: DenseOptim | ValuesOptim, decay: float = 0.0):
        self.parameters = parameters
        matrices = [p for p in parameters.values() if p.dim() > 1]
        others = [p for p in parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = _adam(groups, settings)
        # Adam makes its moments at the first step; made now, a checkpoint of step 0 has the same tensors as any other.
        for p in parameters.values():
            self.adam.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        self.updates = torch.zeros((), dtype=torch.int64)
        self.take_up()

    def take_up(self) -> None:
        """Go on from what was copied into `state_tensors`.

        Adam's bias correction needs the number of updates: torch keeps it for each tensor, apex for each group.
        """
        for group in self.adam.param_groups:
            group["step"] = int(self.updates)
        if isinstance(self.adam, torch.optim.AdamW):
            for p in self.parameters.values():
                self.adam.state[p]["step"] = torch.tensor(float(self.updates), device=p.device)

    def gradient_norm(self) -> Tensor:
        """Euclidean norm over all gradients, fp32 scalar."""
        grads = self._gradients()
        return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())

    def scale_gradients(self, factor: float | Tensor) -> None:
        torch._foreach_mul_(self._gradients(), factor)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def step(self, lr: float, step: int) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.updates += 1

    def clear(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """`updates` () int64 on the CPU, and the moments; the tensors themselves, not copies."""
        moments = {
            f"{name}.{key}": self.adam.state[p][key]
            for name, p in self.parameters.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {"updates": self.updates, **moments}


def _adam(groups: list[dict[str, Any]], settings: DenseOptim | ValuesOptim) -> torch.optim.Optimizer:
    """torch's fused AdamW, or apex's where it is asked for; UserError if NVIDIA's apex is not there."""
    if isinstance(settings, DenseOptim) and settings.fused == "apex":
        try:
            from apex.optimizers import FusedAdam  # PyPI's package `apex` is another and has no such module

            return FusedAdam(groups, lr=0.0, betas=settings.betas, eps=settings.eps, adam_w_mode=True)
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"NVIDIA's apex with its CUDA extensions cannot be used: {error}",
                "optim.dense.fused",
                "choose torch, or build apex from its source (python scripts/doctor.py says what is installed)",
            ) from None
    # Some versions of torch's fused kernels leave out elements beyond 2^31.
    fused = all(p.numel() < 2**31 for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused, foreach=not fused)


class LossScale:
    """Dynamic loss scaling for fp16: halved on overflow, doubled after `GROWTH_STEPS` clean steps; 1 and fixed otherwise."""

    GROWTH_STEPS = 2000
    INITIAL = 2.0**16

    def __init__(self, active: bool):
        self.active = active
        self.value = self.INITIAL if active else 1.0
        self.clean_steps = 0

    def update(self, overflowed: bool) -> None:
        if not self.active:
            return
        if overflowed:
            self.value, self.clean_steps = max(self.value / 2, 1.0), 0
        else:
            self.clean_steps += 1
            if self.clean_steps == self.GROWTH_STEPS:
                self.value, self.clean_steps = self.value * 2, 0

    def record(self) -> dict[str, float]:
        return {"value": self.value, "clean_steps": self.clean_steps}

    def load(self, record: dict[str, float]) -> None:
        self.value, self.clean_steps = record["value"], int(record["clean_steps"])


class Optimizers:
    """The dense group and the values' group: learning rates, clipping and updates, each by its own settings."""

    def __init__(self, settings: OptimConfig, model: Transformer):
        self.settings = settings
        self.sharded = any(memory.sharded for _, memory in model.memories())
        tables = {f"blocks.{layer - 1}.memory.values": memory.values for layer, memory in model.memories()}
        named = dict(model.named_parameters())
        values = {name: p for name, p in named.items() if name.removesuffix(".weight") in tables}
        dense = {name: p for name, p in named.items() if name not in values and p.requires_grad}
        self.groups: dict[str, DenseAdam | ValuesAdam] = {
            "dense": DenseAdam(dense, settings.dense, settings.dense.weight_decay)
        }
        if tables and settings.values.update == "dense":
            self.groups["values"] = DenseAdam(values, settings.values)
        elif tables:
            self.groups["values"] = ValuesAdam(
                {f"{name}.weight": table for name, table in tables.items()}, settings.values
            )

    def settings_of(self, group: str) -> DenseOptim | ValuesOptim:
        return self.settings.dense if group == "dense" else self.settings.values

    def learning_rates(self, step: int) -> dict[str, float]:
        return {g: learning_rate(self.settings_of(g), step, self.settings.steps) for g in self.groups}

    def scale_gradients(self, factor: float | Tensor) -> None:
        for group in self.groups.values():
            group.scale_gradients(factor)

    def begin(self, step: int) -> None:
        """Before backward: `update: fused` moves the values inside it."""
        group = self.groups.get("values")
        if isinstance(group, ValuesAdam):
            group.begin(self.learning_rates(step)["values"], step)

    def sum_over_ranks(self) -> None:
        """After backward on several ranks: add up what they found for the values; the dense part is added up in backward."""
        group = self.groups.get("values")
        if group is None or self.sharded or dist.world_size() == 1:
            return
        if isinstance(group, ValuesAdam):
            for table in group.tables:
                sum_gradient(table)
        else:
            for p in group.parameters.values():
                assert p.grad is not None
                dist.all_reduce(p.grad)

    def gradient_norms(self) -> dict[str, float]:
        """The Euclidean norm of each group's gradient, over all ranks."""
        norms = {name: group.gradient_norm() for name, group in self.groups.items()}
        if self.sharded and "values" in norms:
            norms["values"] = dist.all_reduce(norms["values"].square()).sqrt()
        return {name: float(norm) for name, norm in norms.items()}

    def step(self, step: int, norms: dict[str, float]) -> None:
        """Clip each group to its own largest norm (FACTS: XLM clips the values apart from the rest), then update it."""
        rates = self.learning_rates(step)
        for name, group in self.groups.items():
            clip = self.settings_of(name).clip
            if clip is not None and norms[name] > clip:
                group.scale_gradients(clip / (norms[name] + 1e-6))
            group.step(rates[name], step)

    def clear(self) -> None:
        for group in self.groups.values():
            group.clear()

    def state_tensors(self) -> dict[str, Tensor]:
        return {f"{g}.{name}": t for g, group in self.groups.items() for name, t in group.state_tensors().items()}

    def take_up(self) -> None:
        """Go on from what was copied into `state_tensors`."""
        for group in self.groups.values():
            if isinstance(group, DenseAdam):
                group.take_up()


def build_optimizers(settings: OptimConfig, model: Transformer) -> Optimizers:
    return Optimizers(settings, model)
