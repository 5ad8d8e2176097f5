"""Which checkpoint is loaded, and how its tensors come back once it was verified: whole, or into a model's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkm import files
from pkm.checkpoint import shards, tensor_file
from pkm.checkpoint.retention import Retention
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.machine import code_version

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """Tensors are read when they are asked for."""

    step: int
    record: dict[str, Any]
    directory: Path
    entries: dict[str, shards.Entry]
    """Of each tensor its dtype, shape and parts."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a tensor; None if it is not in the checkpoint."""
        kinds = {name: dtype for dtype, name in tensor_file.DTYPES.items()}
        return kinds[self.entries[name]["dtype"]] if name in self.entries else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them whole, on the CPU."""
        whole = {name: torch.empty(e["shape"], dtype=self.dtype(name)) for name, e in self.entries.items()}
        self.copy_into(whole)
        return whole

    def copy_into(self, tensors: dict[str, Tensor], columns: Collection[str] = (), prefix: str = "") -> None:
        """Copy the checkpoint's tensors of which the names begin with `prefix` into `tensors`.

        columns    names of those that are only this rank's columns of the tensor in the checkpoint

        UserError, and nothing copied, if one is missing, left over or has another shape or dtype.
        """
        there = {name for name in self.entries if name.startswith(prefix)}
        for name in sorted(tensors.keys() | there):
            wanted, found = "not there", "not in it"
            if name in tensors:
                shape = list(tensors[name].shape)
                if name in columns:
                    shape[1] *= dist.world_size()
                wanted = f"{tensor_file.DTYPES[tensors[name].dtype]} {shape}"
            if name in there:
                found = f"{self.entries[name]['dtype']} {self.entries[name]['shape']}"
            if wanted != found:
                what = f"it does not fit this model: {name} is {found}, and the model's is {wanted}"
                fix = "use the settings and the version of pkm that it was written with"
                raise UserError(what, str(self.directory), fix)
        with files.explained(self.directory), shards.Reader(self.directory, self.entries) as reader, torch.no_grad():
            for name, tensor in tensors.items():
                reader.read_into(tensor, name, dist.rank() * tensor.shape[1] if name in columns else 0)


def newest(kept: Retention, warn: Warn) -> Loaded | None:
    """The newest checkpoint that verifies; None if there is none at all. `warn` hears of each damaged one on the way.

    UserError if there are some and none verifies. Every rank must call it.
    """
    steps: list[int] = []
    with dist.raise_on_all_ranks():
        if dist.is_main():
            steps = kept.steps()
    steps = dist.broadcast_object(steps)
    for step in reversed(steps):
        loaded = _verified(kept, kept.directory(step), warn)
        if isinstance(loaded, str):
            warn(f"checkpoint {kept.directory(step)} is damaged: {loaded}")
            continue
        if step != steps[-1]:
            warn(f"going on from step {step}, the newest checkpoint that is whole")
        return loaded
    if steps:
        what = f"none of the {len(steps)} checkpoints can be used (named above)"
        fix = "bring one back from a copy; to begin again from step 0, move the run's directory away"
        raise dist.raised_by_rank_0(UserError(what, str(kept.root), fix))
    return None


def load(kept: Retention, which: int | str | Path, warn: Warn) -> Loaded:
    """`Checkpoints.load`."""
    if which == "latest":
        loaded = newest(kept, warn)
        if loaded is None:
            raise dist.raised_by_rank_0(UserError("there is no checkpoint", where=str(kept.root), fix="train first"))
        return loaded
    directory = kept.root
    with dist.raise_on_all_ranks():
        if dist.is_main():
            directory = _find(kept, which)
    directory = dist.broadcast_object(directory)
    found = _verified(kept, directory, warn)
    if isinstance(found, str):
        raise dist.raised_by_rank_0(UserError(f"damaged: {found}", str(directory), "load another checkpoint"))
    return found


def _find(kept: Retention, which: int | str | Path) -> Path:
    if which == "best":
        step = kept.best()
        if step is None and not kept.steps():
            raise UserError("there is no checkpoint", str(kept.root), "train first")
        if step is None:
            what = "no checkpoint is the best one: the run has not been scored on a validation split"
            raise UserError(what, str(kept.root), "ask for the newest: --checkpoint latest")
        which = step
    if isinstance(which, int) or (isinstance(which, str) and which.isdigit()):
        directory = kept.directory(int(which))
    else:
        directory = Path(which)
    if not directory.is_dir():
        have = ", ".join(map(str, kept.steps())) or "none"
        raise UserError("there is no such checkpoint", where=str(directory), fix=f"there are, of steps: {have}")
    return directory


def _verified(kept: Retention, directory: Path, warn: Warn) -> Loaded | str:
    """The checkpoint, or why it cannot be trusted."""
    found = kept.verify_together(directory)
    if isinstance(found, str):
        return found
    here = code_version()["torch"]
    if found["code"]["torch"] != here:
        warn(f"{directory.name} was written under torch {found['code']['torch']}, this is {here}: last bits may differ")
    return Loaded(found["step"], found["record"], directory, found["tensors"])
