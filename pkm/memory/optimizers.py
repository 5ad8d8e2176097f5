"""AdamW for a model of your own, with the lazy Adam of its tables of values inside: one torch optimizer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pkm.config.arguments import check_arguments
from pkm.config.part import Rate
from pkm.config.schema import DenseOptim, ValuesOptim
from pkm.distributed import dist
from pkm.errors import UserError, UserErrors
from pkm.memory.adam import ValuesAdam
from pkm.memory.sharding import sum_gradient
from pkm.memory.values import Values, tables

DENSE, VALUES = DenseOptim(), ValuesOptim()


def optimizers(
    model: nn.Module,
    *,
    lr: float = 2.5e-4,
    betas: tuple[float, float] = DENSE.betas,
    eps: float = DENSE.eps,
    weight_decay: float = DENSE.weight_decay,
    values_lr: float = 1e-3,
    values_betas: tuple[float, float] = VALUES.betas,
    values_eps: float = VALUES.eps,
    values_dtype: Literal["fp32", "bf16", "bf16+master"] = "fp32",
    values_state_dtype: Literal["fp32", "bf16"] = "fp32",
) -> AdamWWithValues:
    """One optimizer for all of `model`: AdamW, and for the tables of its memories Adam on the rows that were read alone.

        optimizer = pkm.optimizers(model, lr=3e-4, values_lr=1e-3, weight_decay=0.1)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    Arguments are the settings of `optim.dense` and, after `values_`, of `optim.values` in a run's config; `weight_decay` is
    decoupled and on matrices only, tables left out. To be made where the model is on its device and before
    DistributedDataParallel wraps it. From then on `values.weight` has no `.grad`: what norms or scales gradients, as
    `clip_grad_norm_`, does so without the tables'. `requires_grad_(False)` on a memory or its table freezes the table all the same.

    Where torch.distributed is initialised, each step averages the tables' gradients over all ranks, as
    DistributedDataParallel does all others: every rank must take it.

    UserError for settings that cannot be, and for a model that DistributedDataParallel has already wrapped.
    """
    settings = checked(
        dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
        dict(lr=values_lr, betas=values_betas, eps=values_eps, dtype=values_dtype, state_dtype=values_state_dtype),
    )
    found = {name: t for name, t in tables(model).items() if not t.frozen}
    if any(isinstance(m, DDP) for m in model.modules()) and not all(t.collects for t in found.values()):
        raise UserError(
            "DistributedDataParallel waits for gradients of whole tables, which there are none of",
            "pkm.optimizers",
            "make the optimizer first, then wrap the model: DistributedDataParallel(model)",
        )
    of_tables = {id(t.weight) for t in found.values()}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in of_tables]
    groups = [
        {"name": "matrices", "params": [p for p in dense if p.dim() > 1], "weight_decay": weight_decay},
        {"name": "vectors", "params": [p for p in dense if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamWWithValues([group for group in groups if group["params"]], found, settings, lr, betas, eps)


class _Dense(DenseOptim):
    """As in a config, but a rate is a number: `auto` needs the run's width."""

    lr: Rate = 2.5e-4


class _Values(ValuesOptim):
    """As in a config, but what depends on the rest of one is said: the rate, how the values are kept."""

    lr: Rate = 1e-3
    dtype: Literal["fp32", "bf16", "bf16+master"] = "fp32"


def checked(dense: dict[str, Any], values: dict[str, Any]) -> ValuesOptim:
    """The values' settings; UserErrors with every mistake in them and in the dense ones."""
    kinds = {"": check_arguments(dense, _Dense), "values_": check_arguments(values, _Values)}
    errors = [UserError(prefix + e.what, fix=e.fix) for prefix, found in kinds.items() for _, e in found.errors]
    if errors:
        raise UserErrors("pkm.optimizers cannot be made of these settings", errors)
    return kinds["values_"].config


class AdamWWithValues(torch.optim.AdamW):
    """torch's AdamW, of which the group "values" holds tables: their steps are lazy Adam's (pkm.memory.adam).

    Learning-rate schedulers, `zero_grad`, `state_dict` and `torch.amp.GradScaler` work as with any torch optimizer; but
    `GradScaler.unscale_` knows nothing of the tables' gradients: leave the unscaling to `GradScaler.step`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        tables: dict[str, Values],
        settings: ValuesOptim,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        self.values, self.updates = ValuesAdam(tables, settings), 0
        if tables:
            weights = [table.weight for table in tables.values()]
            of_values = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": 0.0}
            groups = [*groups, {"name": "values", "params": weights, **of_values}]
        # Some versions of torch's fused kernels leave out elements beyond 2^31; tables are none of their business.
        fused = all(p.numel() < 2**31 for group in groups if group["name"] != "values" for p in group["params"])
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=fused, foreach=not fused)
        # AdamW's own step passes the tables by, as everything without a gradient.
        self.register_step_post_hook(lambda *_: self._step_values())

    @torch.no_grad()
    def _step_values(self) -> None:
        if bool(getattr(self, "found_inf", None) or 0):  # a GradScaler's: this step is to leave no trace
            return
        scale: Tensor | None = getattr(self, "grad_scale", None)
        factor = (1.0 if scale is None else 1 / float(scale)) / dist.world_size()
        for table in self.values.tables:
            if dist.world_size() > 1 and not table.sharded:
                sum_gradient(table)
        self.updates += 1
        for group in self.param_groups:
            if group["name"] == "values":
                self.values.step(float(group["lr"]), self.updates, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the tables' gradients too."""
        super().zero_grad(set_to_none)
        self.values.clear()

    def state_dict(self) -> dict[str, Any]:
        """As of any torch optimizer, and under "values" the tables' moments by name and the number of updates."""
        return {**super().state_dict(), "values": {"updates": self.updates, **self.values.state_tensors()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """UserError, and nothing loaded, where it is not of an optimizer of the same tables."""
        of_values, here = dict(state_dict.get("values", {})), self.values.state_tensors()
        updates = int(of_values.pop("updates", 0))
        kinds = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (of_values, here)]
        if kinds[0] != kinds[1]:
            different = sorted(name for name in {**of_values, **here} if kinds[0].get(name) != kinds[1].get(name))
            raise UserError(
                f"the state is not of an optimizer of this model: {', '.join(different[:3])} differ",
                "load_state_dict",
                "build model and optimizer as they were when it was saved",
            )
        super().load_state_dict({name: part for name, part in state_dict.items() if name != "values"})
        for name, tensor in here.items():
            tensor.copy_(of_values[name])
        self.updates = updates
