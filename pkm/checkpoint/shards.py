"""How ranks split a checkpoint's tensors: which part of each tensor a rank writes, and in which file it finds what it reads.

A manifest's entry of a tensor: {"dtype", "shape" of the whole, "parts": [{"file", "start", "shape"}, ...]}. The parts cover
the whole exactly once and do not name ranks, so any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pkm.checkpoint import tensor_file
from pkm.distributed import dist

Entry = dict[str, Any]
FILE = re.compile(r"rank-\d{5}\.safetensors")


def file_of(rank: int) -> str:
    """Name of the file that holds a rank's parts."""
    return f"rank-{rank:05d}{tensor_file.SUFFIX}"


@dataclass(frozen=True)
class Part:
    """The rows, or the columns, of a tensor that one rank writes."""

    tensor: Tensor
    start: list[int]
    """Where it begins in the whole."""
    whole: list[int]
    """Shape of the whole."""


def own_parts(tensors: dict[str, Tensor], columns: Collection[str] = ()) -> dict[str, Part]:
    """What this rank writes.

    columns    names of tensors of which each rank holds its own columns, as many as any other: it writes these

    All other tensors are replicated: each rank writes some of their rows, so that all ranks write about equal bytes.
    """
    rank, ranks = dist.rank(), dist.world_size()
    parts = {}
    for name in sorted(columns):
        rows, width = tensors[name].shape
        parts[name] = Part(tensors[name], [0, rank * width], [rows, ranks * width])
    alike = {name: tensors[name] for name in sorted(tensors) if name not in columns}
    total = sum(tensor.nbytes for tensor in alike.values())
    offset = 0
    for name, tensor in alike.items():
        rows = len(tensor) if tensor.ndim else 1
        first, end = (_row(total * at // ranks - offset, tensor.nbytes, rows) for at in (rank, rank + 1))
        if first < end or (tensor.nbytes == 0 and rank == 0):
            own = tensor if tensor.ndim == 0 or tensor.nbytes == 0 else tensor[first:end]
            parts[name] = Part(own, [first, *[0] * (tensor.ndim - 1)][: tensor.ndim], list(tensor.shape))
        offset += tensor.nbytes
    return parts


def _row(place: int, size: int, rows: int) -> int:
    """The first of the rows of `size` bytes that begins at byte `place` or after it."""
    return min(max(-(-place * rows // size), 0), rows) if size else 0


def total_bytes(tensors: dict[str, Tensor], columns: Collection[str]) -> int:
    """Of all that the ranks write together."""
    return sum(tensor.nbytes * (dist.world_size() if name in columns else 1) for name, tensor in tensors.items())


def listed(file: str, parts: dict[str, Part]) -> dict[str, Entry]:
    """The manifest's entries of the tensors whose parts are in `file`."""
    return {
        name: {
            "dtype": tensor_file.DTYPES[part.tensor.dtype],
            "shape": part.whole,
            "parts": [{"file": file, "start": part.start, "shape": list(part.tensor.shape)}],
        }
        for name, part in parts.items()
    }


def merged(lists: list[dict[str, Entry]]) -> dict[str, Entry]:
    """The entries of all ranks as one list, by name."""
    whole: dict[str, Entry] = {}
    for entries in lists:
        for name, entry in entries.items():
            if name in whole:
                whole[name]["parts"] += entry["parts"]
            else:
                whole[name] = {**entry, "parts": list(entry["parts"])}
    return dict(sorted(whole.items()))


def problem(entries: dict[str, Entry], file: str, path: Path) -> str | None:
    """How `path` differs from what the entries say of `file`, or None. ValueError if it is no safetensors file."""
    holds = tensor_file.described(path)
    wanted = {name: (e["dtype"], p["shape"]) for name, e in entries.items() for p in e["parts"] if p["file"] == file}
    for name in sorted(wanted.keys() | holds.keys()):
        if holds.get(name) != wanted.get(name):
            found = "{} {}".format(*holds[name]) if name in holds else "missing"
            return f"{file} holds {name} as {found}, not as the manifest says"
    return None


def uncovered(entries: dict[str, Entry]) -> str | None:
    """The name of a tensor whose parts are not the whole of it, or None."""
    sizes = {name: sum(math.prod(part["shape"]) for part in entry["parts"]) for name, entry in entries.items()}
    return next((name for name, size in sizes.items() if size != math.prod(entries[name]["shape"])), None)


class Reader:
    """Tensors of the checkpoint in `directory`: only the bytes that are asked for are read."""

    def __init__(self, directory: Path, entries: dict[str, Entry]):
        self.directory, self.entries = directory, entries
        self._stack, self._files = ExitStack(), dict[str, Any]()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read_into(self, target: Tensor, name: str, first_column: int = 0) -> None:
        """Copy the tensor into `target`, or as many columns of it from `first_column` on as `target` has."""
        begin = [0, first_column, *[0] * target.ndim][: target.ndim]
        for part in self.entries[name]["parts"]:
            start, shape = part["start"], part["shape"]
            low = [max(a, b) for a, b in zip(start, begin, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, shape, begin, target.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            there = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, begin, strict=True))
            file = self._file(part["file"])
            target[here].copy_(file.get_slice(name)[there] if there else file.get_tensor(name))

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(tensor_file.opened(self.directory / name))
        return self._files[name]
