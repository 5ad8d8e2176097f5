"""Optimizers of one run: Adam for everything dense, Muon for its matrices if asked for, and the values' own (paper 4.3).

What is dense is parted into groups with rates of their own: embeddings, addressing (query networks and keys), matrices if they
have settings of their own, and the rest.
Learning rates are functions of the step, never of a counter, so that a resumed run needs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pkm.config.schema import DenseOptim, MatricesOptim, OptimConfig, ValuesOptim
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.memory.adam import ValuesAdam, dead
from pkm.memory.sharding import sum_gradient
from pkm.model.transformer import Transformer
from pkm.train.update_size import UpdateSizes

COLUMNS_ASKED = 16
"""Of a slot's moments, whether it was ever read: one may be too small for its dtype, not so many."""


def learning_rate(settings: DenseOptim | ValuesOptim, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 1) of `steps`.

    A linear warm-up to the peak at `warmup_steps`, then
    inverse_sqrt  peak * sqrt(warmup / step)      (Vaswani et al., 2017; paper 4.3)
    cosine        peak to the floor at `steps`, half a period
    linear        peak to the floor at `steps`
    wsd           peak until the cooldown, in which it falls linearly to the floor at `steps` (Hu et al., 2024)
    constant      peak
    and never below the floor, a share of the peak.
    """
    warmup, peak = settings.warmup_steps, float(settings.lr)
    if step < warmup:
        return peak * step / warmup
    floor, remaining = settings.floor, max(steps - step, 0) / max(steps - warmup, 1)
    if settings.schedule == "inverse_sqrt":
        return peak * max(math.sqrt(max(warmup, 1) / step), floor)
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "cosine":
        remaining = 0.5 * (1 - math.cos(math.pi * remaining))
    elif settings.schedule == "wsd":
        remaining = min(max(steps - step, 0) / max(settings.cooldown * steps, 1), 1.0)
    return peak * (floor + (1 - floor) * remaining)


class DenseAdam:
    """AdamW over named parameters in groups, each with its own learning rate and weight decay, the latter on matrices only;
    or Muon over one of the groups.

    Gradients are left in `.grad` by backward. `state_tensors` names the moments after their parameters, so that a
    checkpoint can be read without the order or the groups in which the parameters were registered, and by either
    implementation.
    """

    def __init__(
        self,
        groups: dict[str, dict[str, nn.Parameter]],
        settings: dict[str, DenseOptim | ValuesOptim],
        matrices: MatricesOptim | None = None,
    ):
        """groups, settings    by the group's name; betas and epsilon are those of the first
        matrices           what updates the group of this name, if there is one
        """
        self.groups = {name: list(parameters.values()) for name, parameters in groups.items()}
        self.parameters = {name: p for parameters in groups.values() for name, p in parameters.items()}
        parts = []
        self.muon: torch.optim.Optimizer | None = None
        if matrices is not None and matrices.optimizer == "muon":
            self.muon = _muon(self.groups["matrices"], matrices.momentum, settings["matrices"].weight_decay)
        for name, parameters in self.groups.items():
            if name == "matrices" and self.muon is not None:
                continue
            decay = getattr(settings[name], "weight_decay", 0.0)
            parts += [
                {"name": name, "params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
                {"name": name, "params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
        self.adam = _adam([part for part in parts if part["params"]], next(iter(settings.values())))
        # Adam makes its moments at the first step; made now, a checkpoint of step 0 has the same tensors as any other.
        for part in self.adam.param_groups:
            for p in part["params"]:
                self.adam.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        if self.muon is not None:
            for p in self.groups["matrices"]:
                self.muon.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        self.updates = torch.zeros((), dtype=torch.int64)
        self.sync_step_count()

    def sync_step_count(self) -> None:
        """After moments were loaded into `state_tensors`, set Adam's step counters to the number of updates.

        Adam's bias correction reads them; torch keeps one for each tensor, apex one for each group.
        """
        for group in self.adam.param_groups:
            group["step"] = int(self.updates)
        if isinstance(self.adam, torch.optim.AdamW):
            for p in self.adam.state:
                self.adam.state[p]["step"] = torch.tensor(float(self.updates), device=p.device)

    def gradient_norm(self, parameters: list[nn.Parameter] | None = None) -> Tensor:
        """Euclidean norm over the gradients of some parameters, or of all; fp32 scalar."""
        grads = _gradients(self.parameters.values() if parameters is None else parameters)
        return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())

    def scale_gradients(self, factor: float | Tensor, parameters: list[nn.Parameter] | None = None) -> None:
        """Of some parameters, or of all."""
        grads = _gradients(self.parameters.values() if parameters is None else parameters)
        if grads and not (is_known(factor) and factor == 1):
            torch._foreach_mul_(grads, factor)

    def step(self, lr: dict[str, float], skip: Tensor | None = None) -> None:
        """Update; lr by the group's name. With `skip` () fp32 on the device, 1 leaves no trace, and nobody waits to know it."""
        for optimizer in (self.adam, self.muon):
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr[group["name"]]
            if skip is None:
                optimizer.step()
            else:
                _step_unless(skip, optimizer)
        if skip is None:
            self.updates += 1
        else:
            self.updates = self.updates.to(skip.device) + (skip == 0)

    def clear(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """`updates` () int64 on the CPU, and the moments; the tensors themselves, not copies."""
        moments: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            of_p = self.adam.state[p] if self.muon is None or p not in self.muon.state else self.muon.state[p]
            moments |= {f"{name}.{key}": tensor for key, tensor in of_p.items() if key != "step"}
        return {"updates": self.updates, **moments}


def is_known(number: float | Tensor) -> bool:
    """Whether a number can be asked for without waiting for a GPU."""
    return isinstance(number, float) or number.device.type == "cpu"


def _step_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update, or with `skip` () = 1 leave no trace; who waits for its number is only who counts updates on the CPU."""
    if isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]:
        optimizer.found_inf = skip  # type: ignore[attr-defined]  # as a GradScaler sets it
        optimizer.step()
    elif isinstance(optimizer, torch.optim.AdamW) or "step" in optimizer.param_groups[0]:
        if not skip:
            optimizer.step()
    else:  # Muon keeps no count, and knows of no such flag: what it moved is put back
        moved = [t for p, of_p in optimizer.state.items() for t in (p, *of_p.values())]
        before = [t.detach().clone() for t in moved]
        optimizer.step()
        with torch.no_grad():
            for tensor, was in zip(moved, before, strict=True):
                tensor.copy_(torch.where(skip == 0, tensor, was))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _adam(groups: list[dict[str, Any]], settings: DenseOptim | ValuesOptim) -> torch.optim.Optimizer:
    """torch's fused AdamW, or apex's where it is asked for; UserError if NVIDIA's apex is not there."""
    if isinstance(settings, DenseOptim) and settings.implementation == "apex":
        try:
            from apex.optimizers import FusedAdam  # PyPI's package `apex` is another and has no such module

            return FusedAdam(groups, lr=0.0, betas=settings.betas, eps=settings.eps, adam_w_mode=True)
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"NVIDIA's apex with its CUDA extensions cannot be used: {error}",
                "optim.dense.implementation",
                "choose torch, or build apex from its source (python scripts/doctor.py says what is installed)",
            ) from None
    # Some versions of torch's fused kernels leave out elements beyond 2^31.
    fused = all(p.numel() < 2**31 for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused, foreach=not fused)


def _muon(matrices: list[nn.Parameter], momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    """torch's Muon, at the size of Adam's updates; UserError if this torch has none."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"torch {torch.__version__} has no Muon",
            "optim.matrices.optimizer",
            "choose adam, or install torch 2.9 or later",
        )
    group = {"name": "matrices", "params": matrices}
    return torch.optim.Muon(
        [group], lr=0.0, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )


def parted(settings: OptimConfig, model: Transformer) -> dict[str, dict[str, nn.Parameter]]:
    """Everything dense by group and name; matrices are a group of their own where they have settings of their own."""
    groups = model.groups()
    if settings.matrices is not None:
        dense = groups["dense"]
        groups["matrices"] = {name: p for name, p in dense.items() if p.dim() == 2}
        groups["dense"] = {name: p for name, p in dense.items() if p.dim() != 2}
    return groups


class LossScale:
    """Dynamic loss scaling for fp16: halved on overflow, doubled after `GROWTH_STEPS` clean steps; 1 and fixed otherwise.

    Where it is active its numbers are on the device, and follow from what is there: nobody waits for them.
    """

    GROWTH_STEPS = 2000
    INITIAL = 2.0**16

    def __init__(self, active: bool, record: dict[str, float] | None = None, device: torch.device | str = "cpu"):
        """record    what `.record()` gave when it was saved; empty or None at the beginning"""
        self.active = active
        value, clean_steps = (
            (record["value"], record["clean_steps"]) if record else (self.INITIAL if active else 1.0, 0)
        )
        self.value = torch.tensor(value, dtype=torch.float32, device=device)
        self.clean_steps = torch.tensor(int(clean_steps), device=device)

    def update(self, overflowed: Tensor | bool) -> None:
        if not self.active:
            return
        over = torch.as_tensor(overflowed, device=self.value.device).bool()
        clean = torch.where(over, 0, self.clean_steps + 1)
        grows = clean == self.GROWTH_STEPS
        self.value = torch.where(over, (self.value / 2).clamp(min=1.0), torch.where(grows, self.value * 2, self.value))
        self.clean_steps = torch.where(grows, 0, clean)

    def record(self) -> dict[str, float]:
        """Waits for the device."""
        return {"value": float(self.value), "clean_steps": int(self.clean_steps)}


class Optimizers:
    """Groups of parameters and their optimizers: learning rates, clipping and updates, each by its own settings.

    dense     of the groups dense, matrices, embeddings and addressing
    values    the values' own; None without a memory
    """

    def __init__(self, settings: OptimConfig, model: Transformer):
        self.steps = settings.steps
        tables = {f"{name}.weight": table for name, table in model.tables().items()}
        self.tables = tables
        self.sharded = any(table.sharded for table in tables.values())
        groups = parted(settings, model)
        self.settings = {name: settings.group(name) for name in [*groups, *(["values"] if tables else [])]}

        self.dense = DenseAdam(groups, self.settings, settings.matrices)
        self.values: DenseAdam | ValuesAdam | None = None
        if tables and settings.values.update == "dense":
            values = {name: table.weight for name, table in tables.items()}
            self.values = DenseAdam({"values": values}, {"values": self.settings["values"]})
        elif tables:
            self.values = ValuesAdam(tables, self.settings["values"])  # type: ignore[arg-type]
        # Dense parameters whose gradients have one norm, and are scaled together if it is too large.
        apart = [name for name in groups if name != "dense" and getattr(settings, name).clip != "with dense"]
        others = {*tables, *(name for group in apart for name in groups[group])}
        self.clipped = {"dense": [p for name, p in model.named_parameters() if name not in others]}
        self.clipped |= {name: list(groups[name].values()) for name in apart}

    def learning_rates(self, step: int) -> dict[str, float]:
        return {name: learning_rate(group, step, self.steps) for name, group in self.settings.items()}

    def begin(self, step: int) -> None:
        """Before backward: `update: in_backward` moves the values inside it."""
        if isinstance(self.values, ValuesAdam):
            self.values.begin(self.learning_rates(step)["values"], step)

    def sum_over_ranks(self) -> None:
        """After backward on several ranks: add up what they found for the values; the dense part is added up in backward."""
        if self.values is None or self.sharded or dist.world_size() == 1:
            return
        if isinstance(self.values, ValuesAdam):
            for table in self.values.tables:
                sum_gradient(table)
        else:
            for p in self.values.parameters.values():
                assert p.grad is not None
                dist.all_reduce(p.grad)

    def gradient_norms(self) -> dict[str, Tensor]:
        """Euclidean norms over all ranks, scalars where the gradients are: of `dense`, of each group that is clipped apart from
        it, and of `values`."""
        norms = {name: self.dense.gradient_norm(parameters) for name, parameters in self.clipped.items()}
        if self.values is not None:
            norms["values"] = self.values.gradient_norm()
            if self.sharded:
                norms["values"] = dist.all_reduce(norms["values"].square()).sqrt()
        return norms

    def step(
        self, step: int, norms: dict[str, Tensor], scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        """Clip what has a norm to its own largest (FACTS: XLM clips the values apart from the rest), then update.

        norms    of the gradients as they are but for the loss's `scale`, which is taken out of them here
        skip     () fp32 beside the gradients, or None where they are known to be finite: 1 = leave no trace
        """
        rates = self.learning_rates(step)
        factors = {name: self._factor(self.settings[name].clip, norm, scale) for name, norm in norms.items()}
        for name, parameters in self.clipped.items():
            self.dense.scale_gradients(factors.get(name, 1.0), parameters)
        self.dense.step(rates, skip)
        if isinstance(self.values, ValuesAdam):
            factor = factors.get("values", 1.0)
            self.values.step(
                rates["values"], step, factor if skip is None else torch.where(skip == 0, factor, math.nan)
            )
        elif self.values is not None:
            self.values.scale_gradients(factors.get("values", 1.0))
            self.values.step(rates, skip)

    def _factor(self, clip: float | None, norm: Tensor, scale: float | Tensor) -> float | Tensor:
        """What gradients of this norm, `scale` taken out of it, are multiplied by: 1 / scale and, if it is too large, clipped."""
        if clip is None:
            return 1 / scale
        exact = norm.double()
        clipped = torch.where(exact <= clip, 1.0, clip / (exact + 1e-6))
        return (clipped / scale).float()

    def neglect(self, step: int) -> dict[str, dict[str, float]]:
        """By table, what its rows say of how little they are read: see ValuesAdam.neglect."""
        if isinstance(self.values, DenseAdam):
            squares = {name: self.values.adam.state[p]["exp_avg_sq"] for name, p in self.values.parameters.items()}
            found = {name: {"dead": dead(square)} for name, square in squares.items()}
        else:
            found = self.values.neglect(step) if self.values is not None else {}
        return {name.removesuffix(".weight"): of for name, of in found.items()}

    def update_sizes(self) -> UpdateSizes:
        """To be made before `begin` and asked after `step`."""
        tables: list[Tensor] = []
        if isinstance(self.values, ValuesAdam):
            tables = self.values.updated()
        elif self.values is not None:
            tables = list(self.values.parameters.values())
        return UpdateSizes(self.dense.groups, tables, self.sharded)

    def never_read(self) -> dict[int, float]:
        """By the id of each table, the share of its slots that no step has read so far, %.

        Their moments tell it, which are 0 until the first read: nothing is counted, and a resumed run knows it too.
        """
        moments = {} if self.values is None else self.values.state_tensors()
        found = {}
        for name, table in self.tables.items():
            of_table = [
                t
                for key, t in moments.items()
                if key.startswith(f"{name}.") and not key.endswith((".master", ".last_read"))
            ]
            read = torch.stack([t[:, :COLUMNS_ASKED].ne(0).any(1) for t in of_table]).any(0)
            found[id(table)] = 100 * (1 - float(read.double().mean()))
        return found

    def clear(self) -> None:
        for optimizer in self._optimizers():
            optimizer.clear()

    def state_tensors(self) -> dict[str, Tensor]:
        tensors = {f"dense.{name}": t for name, t in self.dense.state_tensors().items()}
        if self.values is not None:
            tensors |= {f"values.{name}": t for name, t in self.values.state_tensors().items()}
        return tensors

    def sync_step_count(self) -> None:
        """Go on from what was copied into `state_tensors`."""
        for optimizer in self._optimizers():
            if isinstance(optimizer, DenseAdam):
                optimizer.sync_step_count()

    def _optimizers(self) -> list[DenseAdam | ValuesAdam]:
        return [self.dense] if self.values is None else [self.dense, self.values]


def build_optimizers(settings: OptimConfig, model: Transformer) -> Optimizers:
    return Optimizers(settings, model)
