"""One safetensors file: written as a stream that is hashed on its way, read back without running any code.

The library's own writer holds a second copy of all tensors, hides the reason of a failed write and gives no hash;
reading is left to it. Layout: 8 bytes header length, JSON header padded with spaces, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pkm.checkpoint import kill_points

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SUFFIX = ".safetensors"


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[int, str]:
    """Write `tensors` (any device, any shape) to the new file `path`, down to the disk; (bytes, sha256) of the file.

    One tensor at a time is copied to the CPU. OSError as the system gives it, FileExistsError if `path` exists.
    """
    digest = hashlib.sha256()
    # Wide elements first, so that each tensor starts at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with path.open("xb") as file:
        for data in _pieces(names, tensors, metadata):
            digest.update(data)
            file.write(data)
            kill_points.point("checkpoint:in-shard")
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def described(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype (one of `DTYPES`' names) and shape of each tensor in a safetensors file. ValueError if it is none."""
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def opened(path: Path) -> Any:
    """A safetensors file to read tensors and slices of them from, on the CPU. ValueError if it is none, OSError as the system gives it."""
    path.open("rb").close()  # the library does not say what is wrong with a file that cannot be read
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def _pieces(
    names: list[str], tensors: dict[str, Tensor], metadata: dict[str, str] | None
) -> Iterator[bytes | memoryview]:
    yield _header(names, tensors, metadata)
    for name in names:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(names: list[str], tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name in names:
        tensor, end = tensors[name], offset + tensors[name].nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
