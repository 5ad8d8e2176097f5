"""Who computes a memory on a device: chosen once, when the layer is built or moved, and then asked for every operator."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pkm.errors import UserError
from pkm.memory.kernels import dot_op, flat_search_op, read_op, reference, search_op, statistics, top_op

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

WHAT = {
    "reference": "reference: plain PyTorch, all k x k sums",
    "torch": "torch: pair shortcut, embedding bags, compact row gradients",
    "triton": "triton: fused search, sliced read, backward by row",
}


@dataclass(frozen=True)
class Backend:
    """The operators of a memory, of one kind of kernels. All kinds give the same but for rounding."""

    name: str = "reference"
    """ "reference", "torch" or "triton": operators take it, since they take no objects."""
    faiss: bool = False
    """Whether faiss searches the keys; the rest is as `name` says."""

    @property
    def searches_plainly(self) -> bool:
        """Whether keys are searched by their own `search`, or by faiss, and not by the operators here."""
        return self.faiss or self.name == "reference"

    def search(self, query: Tensor, keys: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Of product keys, with softmax: see `search_op.search`."""
        return search_op.search(query, keys, bias, k, self.name)

    def search_flat(self, query: Tensor, keys: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Of flat keys, with softmax: see `flat_search_op.search_flat`."""
        return flat_search_op.search_flat(query, keys, bias, k, self.name)

    def top(self, values: Tensor, k: int) -> Tensor:
        """Indices of the k largest of each row: see `reference.top`. Sorted, where another way would wait for the GPU."""
        quick = self.name == "torch" and values.device.type == "cpu"
        return top_op.top(values, k) if quick else reference.top(values, k)

    def read(self, table: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted sum of rows: see `read_op.read`."""
        plan = read_op.plan_rows(indices) if self.name == "triton" and torch.is_grad_enabled() else []
        return read_op.read(table, indices, weights, plan, dtype, self.name)

    def dots(self, x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
        """Products of tokens with rows: see `dot_op.dots`."""
        return dot_op.dots(x, table, indices, self.name)

    def column_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count: see `statistics.column_statistics`."""
        return statistics.column_statistics(x, mask, self.name)

    def __str__(self) -> str:
        """One line for the log."""
        if not self.faiss:
            return WHAT[self.name]
        return f"faiss {_version('faiss')}: key search; the rest {WHAT[self.name]}"


REFERENCE = Backend()


def check(wanted: str) -> None:
    """UserError if `memory.kernels` names a package that is not installed."""
    if wanted == "triton" and not TRITON:
        raise UserError(
            "kernels: triton needs the package triton, which is not installed",
            "memory.kernels",
            "install a CUDA build of torch, which brings it, or choose auto",
        )
    if wanted == "faiss" and importlib.util.find_spec("faiss") is None:
        raise UserError(
            "kernels: faiss needs the package faiss, which is not installed",
            "memory.kernels",
            "pip install faiss-cpu (or a GPU build), or choose auto",
        )


def choose(wanted: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
    """Who computes on `device`, with weights of `dtype`, when `memory.kernels` is `wanted`. UserError if that cannot be."""
    if wanted == "reference":
        return REFERENCE
    if wanted == "triton" and device.type != "cuda" and not INTERPRETED:
        raise UserError(
            f"kernels: triton runs on a CUDA device, not on {device.type}",
            "memory.kernels",
            "choose auto or reference",
        )
    if wanted == "triton" or (device.type == "cuda" and TRITON):
        # Triton's kernels know no float64.
        return Backend("torch" if dtype is torch.float64 else "triton", wanted == "faiss")
    return Backend("torch" if device.type in ("cuda", "cpu") else "reference", wanted == "faiss")


def give(module: nn.Module, backend: Backend) -> None:
    """Let every part of a memory that holds a backend use this one."""
    for part in module.modules():
        if isinstance(getattr(part, "backend", None), Backend):
            part.backend = backend  # type: ignore[assignment]


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu", f"{package}-gpu-cu12", f"{package}-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
