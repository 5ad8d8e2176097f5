"""A checkpoint that was verified, and how its tensors come back: whole, or into a model's own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkm import files
from pkm.checkpoint import shards, tensor_file
from pkm.distributed import dist
from pkm.errors import UserError


@dataclass(frozen=True)
class Loaded:
    """Tensors are read when they are asked for."""

    step: int
    record: dict[str, Any]
    directory: Path
    entries: dict[str, shards.Entry]
    """Of each tensor its dtype, shape and parts."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them whole, on the CPU."""
        kinds = {name: dtype for dtype, name in tensor_file.DTYPES.items()}
        whole = {name: torch.empty(e["shape"], dtype=kinds[e["dtype"]]) for name, e in self.entries.items()}
        self.copy_into(whole)
        return whole

    def copy_into(self, tensors: dict[str, Tensor], columns: Collection[str] = (), prefix: str = "") -> None:
        """Copy the checkpoint's tensors of which the names begin with `prefix` into `tensors`.

        columns    names of those that are only this rank's columns of the tensor in the checkpoint

        UserError, and nothing copied, if one is missing, left over or has another shape.
        """
        there = {name for name in self.entries if name.startswith(prefix)}
        for name in sorted(tensors.keys() | there):
            shape = list(tensors[name].shape) if name in tensors else None
            if shape is not None and name in columns:
                shape[1] *= dist.world_size()
            found = self.entries[name]["shape"] if name in there else None
            if shape != found:
                raise UserError(
                    f"it does not fit this model: {name} is {found or 'not in it'}, and the model's is {shape or 'not there'}",
                    where=str(self.directory),
                    fix="use the settings and the version of pkm that it was written with",
                )
        with files.explained(self.directory), shards.Reader(self.directory, self.entries) as reader, torch.no_grad():
            for name, tensor in tensors.items():
                reader.read_into(tensor, name, dist.rank() * tensor.shape[1] if name in columns else 0)
