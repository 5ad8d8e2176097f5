"""Which kernels a memory uses, and that they are there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch

from pkm.errors import UserError

# Asked once: `choose` runs in every forward, and inside compiled code.
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

WHAT = {
    "reference": "reference: plain PyTorch, all k x k sums",
    "torch": "torch: pair shortcut, embedding bags, compact row gradients",
    "triton": "triton: fused search, sliced read, backward by row",
}


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


def choose(wanted: str, device: torch.device) -> str:
    """ "reference", "torch" or "triton": who reads and, but for `faiss`, searches on `device` when `memory.kernels` is `wanted`.

    UserError if that cannot be.
    """
    if wanted == "reference":
        return "reference"
    if wanted == "triton":
        if device.type != "cuda" and not INTERPRETED:
            raise UserError(
                f"kernels: triton runs on a CUDA device, not on {device.type}",
                "memory.kernels",
                "choose auto or reference",
            )
        return "triton"
    if device.type == "cuda":
        return "triton" if TRITON else "torch"
    return "torch" if device.type == "cpu" else "reference"


def describe(wanted: str, device: torch.device) -> str:
    """One line for the log: what `choose` chose."""
    read = WHAT[choose(wanted, device)]
    return f"faiss {_version('faiss')}: key search; the rest {read}" if wanted == "faiss" else read


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu", f"{package}-gpu-cu12", f"{package}-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
