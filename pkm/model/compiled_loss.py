"""Cross-entropy of a chunk of logits on a CPU in one pass, which leaves their gradient where they were.

numba compiles it. A row is worked on while a core's own caches hold it; plain PyTorch goes over all rows a dozen times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkm.corpus.batches import IGNORE
from pkm.memory.kernels.compiled import LEAST, Array, in_order, jit, jit_contracted, jit_reordered
from pkm.memory.kernels.cpu import in_threads

AT_ONCE = 64
"""Rows of a part of the work."""
LOG2_E = np.float32(1.4426950408889634)
SMALLEST = np.float32(-126.0)
"""Exponent of the smallest number of fp32 that is not denormal; what is less stands for 0."""
MAGIC = np.float32(1.5 * 2**23)
"""Added to a small number, it leaves the nearest integer in the last bits of the sum."""
# 2^r for r in [-1/2, 1/2]: the first terms of its Taylor series, off by less than 3e-8 of it.
C1, C2, C3, C4, C5, C6 = (
    np.float32(np.log(2) ** n / f) for n, f in zip(range(1, 7), (1, 2, 6, 24, 120, 720), strict=True)
)


def cross_entropy(
    logits: Tensor, bias: Tensor, targets: Tensor, gradients: bool, cap: None = None, z: float = 0.0
) -> Tensor:
    """Negative log-likelihoods in nats, (n,) fp32; 0 where a target is IGNORE.

    logits (n, W) fp32 or bf16, contiguous, without their bias; bias (W,) fp32, -inf for columns that are no words; targets (n,)
    int64. With `gradients` the logits become d loss / d logits, softmax - one-hot, in place, rounded to their dtype; `z` is that
    of pkm.model.loss.linear_cross_entropy; there is no `cap` here.
    """
    losses = torch.zeros(len(logits), dtype=torch.float32)
    dtype, unused = (torch.uint16, 16) if logits.dtype is torch.bfloat16 else (torch.uint32, 0)
    bits, biases, wanted, found = (t.numpy() for t in (logits.view(dtype), bias, targets, losses))

    def part(first: int) -> None:
        some = slice(first, first + AT_ONCE)
        _rows(bits[some], np.uint32(unused), biases, wanted[some], gradients, np.float32(z), found[some])

    in_threads(part, [(first,) for first in range(0, len(logits), AT_ONCE)])
    return losses


@jit
def _rows(logits: Array, unused: Any, bias: Array, targets: Array, gradients: bool, z: Any, losses: Array) -> None:
    """logits (n, W) as bits, of which fp32 has `unused` more at the end: 16 for bf16, 0 for fp32."""
    width = logits.shape[1]
    x, e = np.empty(width, np.float32), np.empty(width, np.float32)
    x_bits, e_bits = x.view(np.uint32), e.view(np.uint32)
    # What is dropped is rounded to the nearest, of two as near to the even one.
    odd = np.uint32(unused > 0)
    below_half = (np.uint32(1) << (unused - odd)) - np.uint32(1)
    for row in range(len(logits)):
        if targets[row] == IGNORE:
            if gradients:
                logits[row] = 0
            continue
        for c in range(width):
            x_bits[c] = np.uint32(logits[row, c]) << unused
        losses[row] = _row(x, x_bits, e, e_bits, bias, targets[row], gradients, z)
        if gradients:
            for c in range(width):
                bits = e_bits[c]
                logits[row, c] = (bits + below_half + ((bits >> unused) & odd)) >> unused


@jit
def _row(x: Array, x_bits: Array, e: Array, e_bits: Array, bias: Array, target: Any, gradients: bool, z: Any) -> Any:
    """The loss of one row x (W,), which is lost; `e` becomes its gradient."""
    x += bias
    e_bits[0] = np.uint32(_largest(x_bits.view(np.int32)))
    top = e[0]
    picked = x[target]
    _exponentials(x, x_bits, e, e_bits, top)
    total = _sum(e)
    normaliser = top + np.log(total)
    if gradients:
        factor = (np.float32(1) + np.float32(2) * z * normaliser) / total
        for c in range(len(e)):
            e[c] *= factor
        e[target] -= np.float32(1)
    return normaliser - picked


@jit
def _largest(bits: Array) -> Any:
    """Bits of the largest of the numbers whose bits (W,) int32 these are. Compilers find no lanes for the maximum of floats."""
    top = LEAST
    for c in range(len(bits)):
        top = max(top, in_order(bits[c]))
    return in_order(top)


@jit_contracted
def _exponentials(x: Array, x_bits: Array, e: Array, e_bits: Array, top: Any) -> None:
    """e = exp(x - top); x is lost. With y the power of two that this is and n the integer next to it: 2^(y - n), times 2^n."""
    for c in range(len(x)):
        y = (x[c] - top) * LOG2_E
        y = SMALLEST if y < SMALLEST else y
        shifted = y + MAGIC
        r = y - (shifted - MAGIC)
        x[c] = shifted
        e[c] = np.float32(1) + r * (C1 + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
    for c in range(len(x)):  # n stands in the last bits of `shifted`: here it is added to the exponent
        e_bits[c] += x_bits[c] << np.uint32(23)


@jit_reordered
def _sum(e: Array) -> Any:
    total = np.float32(0)
    for c in range(len(e)):
        total += e[c]
    return total
