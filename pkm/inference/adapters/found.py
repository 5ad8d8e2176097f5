"""What a file or directory of another program holds: its tensors, and what it says of the model they are of."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkm.checkpoint import tensor_file
from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.files import explained, read_json, sha256
from pkm.inference.adapters.names import Entry

SUBWORDS = ("codes", "vocab", "tokenizer.json")
"""Files that say what ids mean."""


@dataclass(frozen=True)
class Found:
    """A model by another program.

    tensors     by its names
    settings    a run's config as far as the file tells it, as YAML would hold it
    unsaid      dotted keys that the file does not tell and that no default can stand for
    table       names of a model of that config
    step        updates it was trained for; 0 if nobody knows
    subwords    SHA-256 of those files of SUBWORDS that are known
    files       to lie beside the run, by name
    """

    tensors: Mapping[str, Tensor]
    settings: dict[str, Any]
    table: Callable[[Config], Sequence[Entry]]
    unsaid: tuple[str, ...] = ()
    step: int = 0
    subwords: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_tensors(path: Path) -> Any:
    """What a file holds: tensors by name of a safetensors file; of a pickle whatever plain values and tensors it is made of.

    Nothing in a pickle is run. UserError for anything else, and where it cannot be read.
    """
    with explained(path), path.open("rb") as file:
        file.read(1)
    if path.suffix == tensor_file.SUFFIX:
        return read_safetensors([path])
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # torch raises what its readers do: UnpicklingError, RuntimeError, EOFError, KeyError, ...
        what = f"it is no file of tensors and plain values, and nothing else is read from a pickle: {_reason(error)}"
        fix = "where it was made, save its state_dict() alone with torch.save, or as safetensors"
        raise UserError(what, str(path), fix) from None


def _reason(error: Exception) -> str:
    """What torch found in a file; not its advice, which is to run it all the same."""
    if found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
        return f"{found[1]} is in it"
    if isinstance(error, pickle.UnpicklingError):
        return "torch.save did not write it"
    if isinstance(error, EOFError):
        return "it is empty or cut short"
    return str(error).split("\n")[0][:200]


def read_safetensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of several files together. UserError if one is no safetensors file."""
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            with explained(path), tensor_file.opened(path) as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except ValueError as error:
            raise UserError(str(error), str(path), "copy it again from where it comes") from None
    return found


def refuse_not_finite(name: str, tensor: Tensor, where: str) -> None:
    """UserError for a tensor with NaN or infinities in it: no training goes on from it."""
    if not bool(tensor.isfinite().all()):
        raise UserError(f"{name} would not be finite", where, "take a file from before its training diverged")


def sharded(directory: Path) -> dict[str, Tensor]:
    """Weights of a directory as transformers saves them: model.safetensors, or its parts by the index."""
    index = read_json(directory / "model.safetensors.index.json")
    if index is None:
        return read_safetensors([directory / "model.safetensors"])
    try:
        names = sorted({str(name) for name in index["weight_map"].values()})
    except (KeyError, AttributeError):
        raise UserError(
            "the index is damaged", str(directory / "model.safetensors.index.json"), "copy it again"
        ) from None
    return read_safetensors([directory / name for name in names])


def subwords_in(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of SUBWORDS that is there; beside codes, tokenizer.json is another file (pkm.inference.export)."""
    there = [name for name in SUBWORDS if (directory / name).is_file()]
    return {name: sha256(directory / name) for name in there if name != "tokenizer.json" or "codes" not in there}


def of_another_vocabulary(known: Mapping[str, str], corpus: Path) -> str | None:
    """The first file of a corpus that says of its ids what the model's does not; None if there is none, or nobody knows."""
    here = subwords_in(corpus)
    return next((name for name in SUBWORDS if name in known and here.get(name, known[name]) != known[name]), None)
