"""Lazy Adam for tables of values (Kingma & Ba, 2014; paper 4.3 "sparse updates").

A row that was not read in a step does not move, and neither do its moments. Bias correction uses the global step, not the
number of times a row was read, as torch's SparseAdam does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pkm.config.schema import ValuesOptim
from pkm.errors import UserError
from pkm.memory.kernels import adam_step
from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.values import Values

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ValuesAdam:
    """The values' optimizer: takes the tables over, so that their `weight` no longer gets a `.grad`.

    step t on a row with gradient g:  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
    row <- row - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),  before it row <- row (1 - lr weight_decay)

    `update: in_backward` wants `.begin` before each backward, which then moves the rows; `.step` only ends it. A number of
    the gradient that is not finite moves nothing; that the rest of the step is skipped cannot be taken back there.
    Numbers kept in bf16 are rounded stochastically, by noise that depends on step, table, row and column alone.
    """

    def __init__(self, tables: dict[str, Values], settings: ValuesOptim):
        """tables    by name: `state_tensors` names what it keeps after them."""
        self.names, self.tables, self.settings = list(tables), list(tables.values()), settings
        self.in_backward = settings.update == "in_backward"
        self.moments: list[tuple[Tensor, Tensor]] = []
        self.masters: list[Tensor | None] = []
        self.last_read: list[Tensor] = []  # (K,) int32 of each table: the step that read a row last, 0 = none
        self.numbers: dict[int, Tensor] = {}
        for table in self.tables:
            table.collect_rows()
            values = table.weight.detach()
            if settings.dtype.startswith("bf16"):  # `auto` of which nobody said what it is here stays fp32
                table.weight.data = values.to(torch.bfloat16)
            self.masters.append(values.float().clone() if settings.dtype == "bf16+master" else None)
            dtype = STATE_DTYPES[settings.state_dtype] if values.dtype is not torch.float64 else values.dtype
            if settings.staleness:
                self.last_read.append(torch.zeros(len(values), dtype=torch.int32, device=values.device))
            self.moments.append((torch.zeros_like(values, dtype=dtype), torch.zeros_like(values, dtype=dtype)))

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of all tables' gradients, fp32 scalar; 0 for `in_backward`, which leaves none."""
        sums = [total.square() for table in self.tables if (total := table.summed()) is not None]
        found = [g.values for table in self.tables if table.summed() is None and (g := table.gradient()) is not None]
        norm = torch.nn.utils.get_total_norm(found) if found else torch.zeros((), device=self.tables[0].weight.device)
        return torch.stack([norm.square(), *sums]).sum().sqrt() if sums else norm

    def begin(self, lr: float, step: int) -> None:
        """Announce the update that the next backward is to apply; nothing to do unless `update: in_backward`."""
        if self.in_backward:
            for i, table in enumerate(self.tables):
                table.inside_backward = _Once(self._step(i, lr, step))

    @torch.no_grad()
    def step(self, lr: float, step: int, factor: float | Tensor = 1.0) -> None:
        """Update the rows that were read with `factor` () times their gradients; `step` counts from 1.

        A factor of NaN moves nothing. One that a GPU holds is not waited for where Triton added the gradients up.
        """
        for i, table in enumerate(self.tables):
            table.inside_backward = None
            total = table.summed()
            if total is not None:
                from pkm.memory.kernels import triton_adam

                here = torch.as_tensor(factor, dtype=torch.float32).to(total.places.device, non_blocking=True)
                triton_adam.update_sum(
                    total, here, table.weight, self._step(i, lr, step, lr * self.settings.weight_decay)
                )
                if self.last_read:
                    self.last_read[i].masked_fill_((total.places >= 0) & ~here.isnan(), step)
                continue
            gradient = table.gradient()
            if gradient is None or (number := float(factor)) != number:
                continue
            if number != 1:
                gradient.values.mul_(number)
            self._decay(i, gradient.rows, lr)
            _update(gradient.rows, gradient.values, table.weight, self._step(i, lr, step))
            if self.last_read:
                self.last_read[i][gradient.rows] = step

    def _decay(self, table: int, rows: Tensor, lr: float) -> None:
        """Shrink rows (U,) of a table, or of its fp32 copy."""
        if self.settings.weight_decay:
            master = self.masters[table]
            kept = self.tables[table].weight if master is None else master
            kept[rows] *= 1 - lr * self.settings.weight_decay

    def updated(self) -> list[Tensor]:
        """What the updates move, (K, d) each: the tables, or their fp32 copies where there are some."""
        return [
            table.weight.detach() if master is None else master
            for table, master in zip(self.tables, self.masters, strict=True)
        ]

    def clear(self) -> None:
        for table in self.tables:
            table.clear_gradient()

    def _step(self, table: int, lr: float, step: int, decay: float = 0.0) -> AdamStep:
        (mean, square), settings = self.moments[table], self.settings
        seed = (step * 1_000_003 + table * 7_919) % (2**31 - 1)
        made = AdamStep(
            mean,
            square,
            self.masters[table],
            lr,
            settings.betas,
            settings.eps,
            step,
            seed,
            self.tables[table].first_column,
            decay,
        )
        if self.tables[table].backend.name == "triton":
            # At the same place in every step, for a graph of launches that is played again.
            on_device = self.numbers.setdefault(table, torch.empty(10, device=mean.device))
            on_device.copy_(made.words(), non_blocking=True)
            made = replace(made, on_device=on_device)
        return made

    def state_tensors(self) -> dict[str, Tensor]:
        """`<table>.mean`, `<table>.square` and, where there are any, `<table>.master` and `<table>.last_read`; the tensors themselves,
        not copies."""
        tensors: dict[str, Tensor] = {}
        for name, (mean, square), master in zip(self.names, self.moments, self.masters, strict=True):
            tensors |= {f"{name}.mean": mean, f"{name}.square": square}
            if master is not None:
                tensors[f"{name}.master"] = master
        return tensors | {f"{name}.last_read": t for name, t in zip(self.names, self.last_read, strict=False)}

    def neglect(self, step: int) -> dict[str, dict[str, float]]:
        """By table, after `step`: `dead` rows that no step has read, %, and where it is counted `stale`, the mean number of steps since
        the others were."""
        found = {}
        for i, (name, (_, square)) in enumerate(zip(self.names, self.moments, strict=True)):
            found[name] = {"dead": dead(square)}
            if self.last_read:
                read = self.last_read[i][self.last_read[i] > 0]
                found[name]["stale"] = float((step - read).double().mean()) if len(read) else 0.0
        return found


def dead(square: Tensor) -> float:
    """Rows that were never read, %, by second moments (K, D): those of the others are above 0. One column is enough to see it."""
    return 100.0 * float((square[:, 0] == 0).double().mean())


class _Once:
    """An update that backward may take once."""

    def __init__(self, step: AdamStep):
        self.step: AdamStep | None = step

    def __call__(self) -> AdamStep:
        step, self.step = self.step, None
        if step is None:
            raise UserError(
                "update: in_backward saw a second backward through one table before the next step began",
                "optim.values.update",
                "choose sparse for gradient accumulation",
            )
        return step


def _update(rows: Tensor, grad: Tensor, table: Tensor, step: AdamStep) -> None:
    if table.is_cuda:
        from pkm.memory.kernels.backend import choose

        if choose("auto", table.device).name == "triton":
            from pkm.memory.kernels import triton_adam

            return triton_adam.update(rows, grad, table, step)
    adam_step.update(rows, grad, table, step)
