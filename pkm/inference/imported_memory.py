"""Memories of other programs' layers, alone or in a model's file, as directories that pkm.ProductKeyMemory.load reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor

from pkm.errors import UserError
from pkm.inference.adapters import lucidrains, peer
from pkm.inference.adapters.found import read_tensors, refuse_not_finite
from pkm.inference.adapters.names import to_ours
from pkm.memory.product_key_memory import ProductKeyMemory

LAYERS: dict[str, ModuleType] = {"lucidrains": lucidrains, "peer": peer}
"""Who knows a layer, by the format's name."""

COUNTER = "num_batches_tracked"
"""Of torch's BatchNorm, which needs it for a momentum of none alone."""


def import_memories(kind: str, path: Path, directory: Path, overrides: Sequence[str] = ()) -> list[Path]:
    """Write a directory for each memory in a file: `directory` for one, below it by their names for several.

    overrides    name=value: arguments of pkm.ProductKeyMemory, such as knn=32

    UserError for a file without one, for what cannot be expressed here, and for what the file does not tell.
    """
    format = LAYERS[kind]
    layers = parts(read_tensors(path), format.MARKS, str(path))
    given = arguments(overrides, format.UNSAID)
    if unsaid := [name for name in format.UNSAID if name not in given]:
        what = f"it does not tell {', '.join(unsaid)}"
        raise UserError(what, str(path), f"give them: {' '.join(f'{name}=...' for name in unsaid)}")
    made = {}
    for prefix, theirs in layers.items():
        where = f"{path}: {prefix}" if prefix else str(path)
        own = dict(given)
        memory = ProductKeyMemory(**{**format.settings(theirs, own, where), **own})
        fill(memory, to_ours(format.table(theirs, where), theirs, where), where)
        made[folder(directory, prefix, str(path)) if len(layers) > 1 else directory] = memory
    for place in made:  # all or none
        if place.exists():
            raise UserError(
                "it is there already, and nothing is overwritten", str(place), "remove it or choose another path"
            )
    for place, memory in made.items():
        memory.save(place)
    return list(made)


def parts(found: Any, marks: Sequence[str], where: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer in a file, by the prefix of their names. UserError if there is none."""
    if isinstance(found, Mapping) and not any(isinstance(value, Tensor) for value in found.values()):
        # A training program's file: {"model": ..., "optimizer": ...}.
        found = next((found[name] for name in ("model", "state_dict", "model_state_dict") if name in found), found)
    if not isinstance(found, Mapping):
        found = {}
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    prefixes = [name.removesuffix(marks[0]) for name in tensors if name == marks[0] or name.endswith(f".{marks[0]}")]
    prefixes = [prefix for prefix in prefixes if shaped(tensors, [prefix + mark for mark in marks])]
    if not prefixes:
        what = f"no layer of that kind is in it, which would have {marks[0]} of 4 dimensions and {marks[1]} of 2"
        raise UserError(what, where, "save the layer's or the model's state_dict() with torch.save or safetensors")
    return {
        prefix: {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix) and not name.endswith(COUNTER)
        }
        for prefix in prefixes
    }


def shaped(tensors: Mapping[str, Tensor], marks: Sequence[str]) -> bool:
    """Whether both marks of a layer are there: its keys, (heads, sub-keys, 2, half a query), and a matrix."""
    return [tensors[name].dim() if name in tensors else 0 for name in marks] == [4, 2]


def folder(directory: Path, prefix: str, where: str) -> Path:
    """Where a layer of several is written. UserError for a name that would lead elsewhere."""
    name = prefix.rstrip(".")
    if "/" in name or "\0" in name or name.startswith("."):
        what = f"a layer in it is called {name!r}, which is no name for a directory"
        raise UserError(what, where, "save the layer's state_dict() alone")
    return directory / name


def arguments(overrides: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
    """name=value, with memory. before it or not: of a ProductKeyMemory, or one `more`. UserError for anything else."""
    known = [*more, *(name for name in inspect.signature(ProductKeyMemory).parameters if name not in more)]
    given = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"{override!r} is no setting", "the command line", "write name=value, for example knn=32")
        where, name = f"argument {override!r}", name.strip().removeprefix("memory.")
        if name not in known:
            raise UserError(f"a memory has no argument {name!r}", where, f"it has: {', '.join(known)}")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            what = f"its value cannot be read: {str(error).splitlines()[0]}"
            raise UserError(what, where, "write a number, a word, or a section as {dim: 64, norm: none}") from None
    return given


def fill(memory: ProductKeyMemory, ours: Mapping[str, Tensor], where: str) -> None:
    own = memory.state_dict()
    for name in sorted(own.keys() | ours.keys()):
        shapes = [tuple(one[name].shape) if name in one else "nothing" for one in (ours, own)]
        if shapes[0] != shapes[1]:
            what = f"{name} would be {shapes[0]} of the file, and of these settings it is {shapes[1]}"
            raise UserError(what, where, "give the settings that it was made with")
        refuse_not_finite(name, ours[name], where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(ours[name])
